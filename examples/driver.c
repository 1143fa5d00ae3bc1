/* driver.c - the bodies of the driver's headers and of kda.h and attnres.h, for programs to link: they
 * take longer to compile than all programs together. */
#define HYBRID_SAVED_IMPLEMENTATION
#include "saved.h"
#define QUANTIZE_CONFIG_IMPLEMENTATION
#include "quantize_config.h"
#define TOKENIZER_IMPLEMENTATION
#include "tokenizer.h"
