// SPDX-License-Identifier: Apache-2.0
// Launches blocks_linear_kernel.cuh, for Python.

#include "blocks_linear_kernel.cuh"
#include "hopper_launch.cuh"

namespace {

constexpr int kMostSplit = 8;  // blocks of a cluster that every Hopper GPU runs together

template <int kTokens, int kGroups, bool kGated>
void launch(Params& p, TensorView x, TensorView weight) {
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  using L = Layout<kTokens, kGroups>;
  uint64_t inner = weight.size(1), columns = p.rows;
  if constexpr (kGated) {
    uint64_t dims[4] = {inner, 8, 2, columns / 8}, strides[3] = {inner, columns * inner, 8 * inner};
    uint32_t box[4] = {kInner, 8, 2, 4 * kGroups};
    p.weight = tensor_map(kBytes, weight, 4, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  } else {
    uint64_t dims[2] = {inner, columns}, strides[1] = {inner};
    uint32_t box[2] = {kInner, 64 * kGroups};
    p.weight = tensor_map(kBytes, weight, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  uint64_t x_dims[2] = {inner, uint64_t(x.size(0))}, x_strides[1] = {inner};
  uint32_t x_box[2] = {kInner, kTokens};
  p.x = tensor_map(kBytes, x, 2, x_dims, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B);
  p.tiles = columns / ((kGated ? 32 : 64) * kGroups), p.stages = L::stages(p.split);
  auto kernel = blocks_linear_kernel<kTokens, kGroups, kGated>;
  // Once: a process has one device.
  static cudaError_t const attribute = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  check(attribute);
  Launch<Params> launch(kernel, L::kThreads, L::bytes(p.stages, p.split), p.split, get_stream(x.device()));
  static int room[kMostSplit + 1] = {};  // clusters at a time, by their size: asking takes long
  int& most = room[p.split];
  if (most == 0) most = launch.clusters();
  int each = (p.tiles + most - 1) / most;  // no cluster has fewer tiles than it must
  launch.start((p.tiles + each - 1) / each, p);
}

template <int kTokens, int kGroups> void launch(bool gated, Params& p, TensorView x, TensorView weight) {
  gated ? launch<kTokens, kGroups, true>(p, x, weight) : launch<kTokens, kGroups, false>(p, x, weight);
}

// The first T rows of x[R, K], T <= `tokens`, times weight[N, K], both e4m3 -> bfloat16 out[T, N] (gated: N / 2);
// float32 x_scales[K / 128, R], R a multiple of 4, scales[N / 128, K / 128]; bfloat16 bias and residual of out's
// columns and shape. tokens: of the kernel, 8, 16 or 32. groups: of 64 rows of a tile, 2 or 4. split: blocks of a
// cluster, which share a tile's columns.
void blocks_linear(TensorView out, TensorView x, TensorView x_scales, TensorView weight, TensorView scales,
                   Optional<TensorView> bias, Optional<TensorView> residual, bool gated, int64_t tokens, int64_t groups,
                   int64_t split) {
  ffi::CUDADeviceGuard guard(x.device().device_id);
  Params p;
  p.turns = weight.size(1) / kInner, p.tokens = out.size(0), p.rows = out.size(1), p.split = split;
  p.x_rows = x_scales.size(1), p.scale_row = scales.stride(0);
  p.x_scales = static_cast<float const*>(x_scales.data_ptr()), p.scales = static_cast<float const*>(scales.data_ptr());
  p.bias = elements<nv_bfloat16>(bias), p.residual = elements<nv_bfloat16>(residual);
  p.out = static_cast<nv_bfloat16*>(out.data_ptr());
  TVM_FFI_ICHECK(p.tokens <= p.x_rows && x.size(0) == p.x_rows && p.x_rows % 4 == 0 && x.size(1) == weight.size(1) &&
                 x_scales.size(0) == p.turns)
      << p.tokens << " tokens of x [" << x.size(0) << ", " << x.size(1) << "] with scales for " << p.x_rows
      << ": should be a multiple of 4, and as long as the weight's rows";
  TVM_FFI_ICHECK(p.tokens <= tokens && p.rows % ((gated ? 32 : 64) * groups) == 0 && weight.size(1) % kInner == 0 &&
                 split > 0 && split <= kMostSplit && split <= p.turns)
      << "no tile of " << tokens << " tokens and " << groups << " groups with a split of " << split << " for " << p.tokens
      << " tokens and a weight [" << weight.size(0) << ", " << weight.size(1) << "]";
#define TILE(T, G) if (tokens == T && groups == G) return launch<T, G>(gated, p, x, weight);
  TILE(8, 2) TILE(16, 2) TILE(32, 2) TILE(8, 4) TILE(16, 4) TILE(32, 4)
#undef TILE
  TVM_FFI_ICHECK(false) << "no tile of " << tokens << " tokens and " << groups << " groups";
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(blocks_linear, blocks_linear);
