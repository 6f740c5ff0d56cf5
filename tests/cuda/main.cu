// SPDX-License-Identifier: Apache-2.0
//
// The functions of csrc/cuda/ptx, each alone on the GPU; exits with 1 where one is wrong.

#include "check.cuh"

int failures;

int main() {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    test_sm80();
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    if (major == 9 && minor == 0) {
        test_sm90();
        test_wgmma();
    }
    return failures ? 1 : 0;
}
