// SPDX-License-Identifier: Apache-2.0
//
// Addresses in shared memory.

#include "emulator.h"

namespace emulated {

void *dynamic_shared() { return current->block->shared + kFirstByte; }

void *static_shared(const void *key, unsigned bytes) {
    Block &block = *current->block;
    void *&at = block.statics[key];
    if (at) return at;
    at = block.shared + kStaticByte + block.static_bytes;
    block.static_bytes += (bytes + 127) / 128 * 128;
    if (block.static_bytes > kBlockBytes - kStaticByte) fail("static shared memory is larger than %u bytes", kBlockBytes - kStaticByte);
    return at;
}

uint32_t shared_address(const void *p) {
    const Cluster &cluster = *current->block->cluster;
    for (uint32_t rank = 0; rank < cluster.size(); rank++) {
        const ptrdiff_t at = static_cast<const unsigned char *>(p) - cluster[rank]->shared;
        if (at >= kFirstByte && at < kBlockBytes) return rank << 24 | static_cast<uint32_t>(at);
    }
    fail("%p is not in shared memory", p);
}

Block &block_at(uint32_t address) {
    const Cluster &cluster = *current->block->cluster;
    if (address >> 24 >= cluster.size() || !cluster[address >> 24]->alive) fail("%x is in no block that runs", address);
    return *cluster[address >> 24];
}

unsigned char *shared_at(uint32_t address, unsigned bytes, unsigned alignment) {
    const Block &block = block_at(address);
    const uint32_t begin = address & 0xffffff, end = begin + bytes;
    const bool is_dynamic = begin >= kFirstByte && end <= kFirstByte + block.dynamic_bytes,
               is_static = begin >= kStaticByte && end <= kStaticByte + block.static_bytes;
    if (!is_dynamic && !is_static) fail("%u bytes at %x are not in shared memory", bytes, address);
    if (begin % alignment) fail("%x is no multiple of %u", address, alignment);
    return block.shared + begin;
}

} // namespace emulated
