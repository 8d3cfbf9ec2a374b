// The runtime functions that an exported CuTe DSL launcher calls, for running it without a GPU: the last launch is kept.
#include <stddef.h>
#include <string.h>

typedef struct {
    unsigned grid[3], block[3];
    size_t shared_bytes;
    void *stream, *attributes;
    unsigned num_attributes;
} launch_config;

enum { MAX_PARAMETERS = 256, MAX_BYTES = 65536 };

// Filled in by the caller: bytes of each kernel parameter.
int parameter_bytes[MAX_PARAMETERS];
int num_parameters;

// Read by the caller.
launch_config last_launch;
unsigned char last_parameters[MAX_BYTES];
int num_launches;

int _cudaLaunchKernelEx(const launch_config *config, const void *kernel, void **parameters) {
    (void)kernel;
    last_launch = *config;
    size_t end = 0;
    for (int i = 0; i < num_parameters; i++) {
        if (end + parameter_bytes[i] > MAX_BYTES) return 1;
        memcpy(last_parameters + end, parameters[i], parameter_bytes[i]);
        end += parameter_bytes[i];
    }
    num_launches++;
    return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return 0;
}

// Asked for the shared memory that a block may have.
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 227 * 1024;
    return 0;
}

int _cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

int _cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)kernel, (void)attribute, (void)value, (void)device;
    return 0;
}

// Handles are only passed around.
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library, (void)name;
    *kernel = &last_launch;
    return 0;
}

int _cudaLibraryLoadData(void **library, const void *code, void *jit_options, void *jit_values, unsigned num_jit,
                         void *options, void *values, unsigned num_options) {
    (void)code, (void)jit_options, (void)jit_values, (void)num_jit, (void)options, (void)values, (void)num_options;
    *library = &last_launch;
    return 0;
}
