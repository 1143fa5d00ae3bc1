/* replay.c - main for a fuzz target without libFuzzer: runs it on the inputs of its corpus, which is
 * tests/fuzz/corpus/<name of the program>, or on the files that are named. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* In memory of exactly its size. */
static int replay(const char *path) {
    FILE *file = fopen(path, "rb");
    long size = -1;
    if (file && fseek(file, 0, SEEK_END) == 0) size = ftell(file);
    uint8_t *bytes = size >= 0 ? (uint8_t *)malloc((size_t)size + (size == 0)) : NULL;
    if (!bytes || fseek(file, 0, SEEK_SET) != 0 ||
        fread(bytes, 1, (size_t)size, file) != (size_t)size) {
        printf("FAIL %s: cannot be read\n", path);
        return 1;
    }
    fclose(file);
    LLVMFuzzerTestOneInput(bytes, (size_t)size);
    free(bytes);
    return 0;
}

int main(int argc, char **argv) {
    char path[600];
    int passed = 0, failed = 0;
    const char *slash = strrchr(argv[0], '/'), *corpus = "tests/fuzz/corpus";
    for (int i = 1; i < argc; i++)
        if (replay(argv[i]))
            failed++;
        else
            passed++;
    if (argc == 1) {
        snprintf(path, sizeof path, "%s/%s", corpus, slash ? slash + 1 : argv[0]);
        DIR *directory = opendir(path);
        for (struct dirent *entry; directory && (entry = readdir(directory)) != NULL;) {
            if (entry->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s/%.255s", corpus, slash ? slash + 1 : argv[0],
                     entry->d_name);
            if (replay(path))
                failed++;
            else
                passed++;
        }
        if (directory) closedir(directory);
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0 || passed == 0;
}
