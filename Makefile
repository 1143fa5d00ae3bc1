# make          builds the programs into build/
# make demo     runs the main job on a checkpoint that the repository carries
# make test     builds and runs every test
# make fuzz     looks for inputs that break a promise, with clang's libFuzzer
#
# CC, CXX, CFLAGS, LDLIBS and BUILD can be given: make CC=clang CFLAGS='-O3' BUILD=build/clang test

CC      ?= cc
CXX     ?= c++
CFLAGS  ?= -O2
BUILD   ?= build
LDLIBS  ?= -lm -pthread

# All processors compile, unless the command line says how many.
ifeq ($(filter -j% --jobs%,$(MAKEFLAGS)),)
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
endif

# The strictest list that the headers promise to pass; what CI turns into errors.
WARNINGS := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wdouble-promotion -Wcast-qual
C_FLAGS  := -std=c11 -D_POSIX_C_SOURCE=200809L $(WARNINGS) -Wstrict-prototypes $(CFLAGS)

HEADERS  := $(wildcard *.h examples/*.h tests/*.h bench/*.h)
PROGRAMS := $(patsubst examples/%.c,$(BUILD)/%,$(filter-out examples/driver.c,$(wildcard examples/*.c)))
CXX_FLAGS := -std=c++17 -D_POSIX_C_SOURCE=200809L $(WARNINGS) $(CFLAGS)
# Writes checkpoints for tests and measurements.
MAKE_CHECKPOINT := $(BUILD)/make_checkpoint
TESTS    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
# What takes longest to compile is compiled once, for those that use kda.h or the driver as they are.
# Other programs and tests have all they need in one source file.
KDA      := $(addprefix $(BUILD)/tests/test_,args faults golden guard kda layer long parts saved \
    speculation threads types)
DRIVER   := $(addprefix $(BUILD)/,chat generate perplexity quantize recall tokenize model decode_ratio) \
    $(MAKE_CHECKPOINT) $(addprefix $(BUILD)/tests/test_,hybrid linear mla quantization sessions stack)

.PHONY: all help demo test mutants coverage fuzz fuzz-replay engine bench bench-quick ratio clean

all: $(PROGRAMS)  ## build the programs (default)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

TEXT_MODEL := examples/models/text-attnres

demo: $(BUILD)/generate  ## go on with a text, and show what the context's memory costs
	@$(BUILD)/generate $(TEXT_MODEL) --prompt "And it came to pass in those days, that " --generate 400 --temperature 0.6 && echo
	@echo; echo "The same model with a context of 100,000 bytes:"
	@$(BUILD)/generate $(TEXT_MODEL) --prompt "And it came to pass" --generate 8 --context 100000 --temperature 0.6 >/dev/null

test: $(PROGRAMS) $(MAKE_CHECKPOINT) $(TESTS) $(BUILD)/tests/short_memory.so  ## build and run every test
	@BUILD=$(BUILD) CC='$(CC)' sh tests/run.sh $(TESTS) tests/symbols.sh

mutants:  ## do the tests see faults? copies of the headers with one fault each: an hour on two cores
	python3 -B tests/mutants.py

# Programs keep their counts in mapped files: those of threads, of several runs of a program and of one
# that a signal ends add up.
COVERAGE = -O1 -fprofile-instr-generate -fcoverage-mapping -fprofile-update=atomic \
    -mllvm -runtime-counter-relocation=true $(ABSENT)

coverage:  ## lines and branches of the headers and programs that the tests reach; needs clang and llvm
	@rm -f $(BUILD)/coverage/*.profraw
	LLVM_PROFILE_FILE='$(abspath $(BUILD))/coverage/%c%m.profraw' \
		$(MAKE) -s test BUILD=$(BUILD)/coverage CC=clang CXX=clang++ CFLAGS='$(COVERAGE)'
	@python3 tests/coverage.py $(BUILD)/coverage

FUZZ       := $(filter-out replay,$(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/*.c)))
FUZZ_FLAGS ?= -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
# Programs compile the kernels that the processor can run, and where these are not the matter, none.
FUZZ_PLAIN  = -DKDA_NO_SIMD -DATTNRES_NO_SIMD
NUMERIC    := attnres conv layer operator speculation
$(NUMERIC:%=$(BUILD)/fuzz/%) $(NUMERIC:%=$(BUILD)/fuzz-replay/%): FUZZ_PLAIN = $(ABSENT)
# Their time goes into loops over numbers: libFuzzer's notes of all comparisons would take most of it.
$(NUMERIC:%=$(BUILD)/fuzz/%): FUZZ_FLAGS += -fno-sanitize-coverage=trace-cmp
# The driver under all these checks takes clang minutes to optimise.
$(BUILD)/fuzz/model $(BUILD)/fuzz/session: FUZZ_PLAIN += -O0

fuzz: $(FUZZ:%=$(BUILD)/fuzz/%)  ## look for inputs that break a promise, FUZZ_SECONDS (60) a target
	@BUILD=$(BUILD) FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) sh tests/fuzz/run.sh $^

fuzz-replay: $(FUZZ:%=$(BUILD)/fuzz-replay/%)  ## the inputs that the repository keeps, with any compiler
	@BUILD=$(BUILD) sh tests/run.sh $^

engine: $(BUILD)/engine  ## build and run the C++ serving example
	$(BUILD)/engine

BENCHES := $(patsubst bench/%.c,$(BUILD)/%,$(wildcard bench/bench_*.c))

bench: $(BENCHES)  ## measure kernels against this machine's limits: a table, and CSV in build/
	@for bench in $(BENCHES); do $$bench --csv $$bench.csv || exit 1; done

bench-quick: $(BENCHES)  ## the same with fewer repetitions, within 50 seconds
	@for bench in $(BENCHES); do $$bench --quick --csv $$bench.csv || exit 1; done

ratio: $(BUILD)/decode_ratio  ## full attention against the hybrid by context, within 50 seconds
	$< --quick --roofline --csv $<.csv --svg $<.svg

# Kernels that an x86 processor cannot run are left out of tests: they take long to compile.
# Programs, and test_header, have all of them.
ABSENT := $(shell grep -sqw sse2 /proc/cpuinfo && ! grep -qw avx512f /proc/cpuinfo && \
    echo -DKDA_NO_AVX512 -DATTNRES_NO_AVX512)

$(BUILD)/kda.o: tests/kda.c kda.h Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(ABSENT) -c $< -o $@

$(BUILD)/driver.o: examples/driver.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -c $< -o $@

$(KDA): $(BUILD)/kda.o
$(DRIVER): $(BUILD)/driver.o

# Each test has one source file of its own, but for the one that is about several.
$(BUILD)/tests/test_header: tests/header_second.c tests/header_static.c
$(BUILD)/tests/test_header: ABSENT :=
$(BUILD)/tests/%: tests/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(ABSENT) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

# For other programs: without their flags.
$(BUILD)/tests/short_memory.so: tests/short_memory.c Makefile
	@mkdir -p $(@D)
	$(CC) -std=c11 $(WARNINGS) -O1 -fPIC -shared $< -o $@

$(BUILD)/fuzz/%: tests/fuzz/%.c $(wildcard tests/fuzz/*.h) $(HEADERS) Makefile
	@mkdir -p $(@D)
	clang $(C_FLAGS) $(FUZZ_FLAGS) $(FUZZ_PLAIN) $< -o $@ -lm -pthread

$(BUILD)/fuzz-replay/%: tests/fuzz/%.c tests/fuzz/replay.c $(wildcard tests/fuzz/*.h) $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(FUZZ_PLAIN) $< tests/fuzz/replay.c -o $@ -lm -pthread

$(MAKE_CHECKPOINT): tests/make_checkpoint.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

$(BUILD)/%: bench/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

$(BUILD)/%: examples/%.c $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

$(BUILD)/%: examples/%.cpp $(HEADERS) Makefile
	@mkdir -p $(@D)
	$(CXX) $(CXX_FLAGS) $< -o $@ $(LDLIBS)

clean:  ## remove what was built
	rm -rf $(BUILD)
