// SPDX-License-Identifier: Apache-2.0
// What kernels for Hopper share: barriers of shared memory, the copy engine's loads and stores, products by warpgroups.
#pragma once

#ifndef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#endif
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <type_traits>
#include <utility>

namespace {

namespace gmma = cute::SM90::GMMA;

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier), "r"(phase)
      : "memory");
}
__device__ __forceinline__ void group_barrier(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// An address of shared memory in the block of this rank of the cluster.
__device__ __forceinline__ uint32_t remote(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Of the default scope: what this thread read is in its registers, and a release to the cluster would cost a fence.
__device__ __forceinline__ void remote_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same for what this thread's warp wrote to the block before.
__device__ __forceinline__ void remote_release(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void remote_store(uint32_t to, float const* v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}
// As barrier_wait, for what other blocks of the cluster wrote before they arrived.
__device__ __forceinline__ void cluster_wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier), "r"(phase)
      : "memory");
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_shared_floats(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
// What passes through L2 once, such as weights: what else is there stays longer.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Dimensions of the maps: column, row; and column, row of 8, gate or up, eight rows.
__device__ __forceinline__ void load(uint32_t to, CUtensorMap const* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void load(uint32_t to, CUtensorMap const* map, uint32_t barrier, int column, int row,
                                     uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void load_pairs(uint32_t to, CUtensorMap const* map, uint32_t barrier, int column, int eight) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %5, %5, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(eight), "r"(0)
      : "memory");
}
__device__ __forceinline__ void load_pairs(uint32_t to, CUtensorMap const* map, uint32_t barrier, int column, int eight,
                                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %5, %5, %4}], [%2], %6;" ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(eight), "r"(0),
      "l"(policy)
      : "memory");
}
__device__ __forceinline__ void load_bytes(uint32_t to, void const* from, uint32_t barrier, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(to),
               "l"(from), "r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void load_bytes(uint32_t to, void const* from, uint32_t barrier, int bytes, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %3, [%2], %4;" ::"r"(to),
      "l"(from), "r"(barrier), "r"(bytes), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void store(CUtensorMap const* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}
// Shared-memory descriptor of a K-major operand in 128-byte swizzle: 8-row groups are 1024 bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}
template <typename Op, size_t... I>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float* sums, bool add, std::index_sequence<I...>) {
  Op::fma(a, b, sums[I]..., add ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
}
// As g / 2 + g / 2 * tanh(g / 2), one special-function instruction, whose error is at most a fifth of what rounding
// results to bfloat16 adds.
__device__ __forceinline__ float silu(float gate) {
  float half = 0.5f * gate, t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(half));
  return fmaf(half, t, half);
}

}  // namespace
