// SPDX-License-Identifier: Apache-2.0
// Launches int4_linear_kernel.cuh, for Python.

#include "int4_linear_kernel.cuh"
#include "tvm_ffi_utils.h"

namespace {

using tvm::ffi::Optional;

struct Kernel {
  void (*function)(Params);
  int rows;                // of out, in a block's tile
  int team_warps;
  int (*bytes)(int, int);  // of shared memory, by teams and stages
};

template <int kTokens, int kTiles, int kRowWarps> Kernel kernel(bool gated) {
  using L = Layout<kTokens, kTiles, kRowWarps>;
  if (gated) return {int4_linear_kernel<kTokens, kTiles, kRowWarps, true>, L::kRows / 2, kRowWarps, L::bytes};
  return {int4_linear_kernel<kTokens, kTiles, kRowWarps, false>, L::kRows, kRowWarps, L::bytes};
}

// Of a tile: tokens; weight rows of a warp; warps that share x. Null where there is none. ops/int4_linear.py has this
// list, too.
Kernel find(int64_t tokens, int64_t warp_rows, int64_t row_warps, bool gated) {
#define TILE(T, ROWS, WARPS) \
  if (tokens == T && warp_rows == ROWS && row_warps == WARPS) return kernel<T, ROWS / 16, WARPS>(gated);
  TILE(8, 64, 1) TILE(8, 64, 2) TILE(8, 32, 1) TILE(8, 32, 2)
  TILE(16, 64, 1) TILE(16, 64, 2) TILE(16, 32, 1) TILE(16, 32, 2)
  TILE(32, 64, 2) TILE(32, 32, 2) TILE(32, 32, 4)
  TILE(48, 32, 4) TILE(64, 32, 2) TILE(64, 32, 4)
#undef TILE
  return {};
}

void check(cudaError_t error) { TVM_FFI_ICHECK(error == cudaSuccess) << cudaGetErrorString(error); }

Element const* elements(Optional<TensorView> const& tensor) {
  return tensor.has_value() ? static_cast<Element const*>(tensor.value().data_ptr()) : nullptr;
}

int shared_memory() {  // bytes that a block may have
  int device, most;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return most;
}

// Whether there is such a tile, and a block of the current device has the warps and the memory for the teams and
// stages.
bool fits(int64_t tokens, int64_t warp_rows, int64_t row_warps, int64_t teams, int64_t stages) {
  Kernel k = find(tokens, warp_rows, row_warps, false);
  return k.function && teams > 0 && teams * k.team_warps <= kMostWarps && stages >= 2 && stages <= kMostStages &&
         k.bytes(teams, stages) <= shared_memory();
}

// Loads one tile's kernels on the current device, so that no launch has to.
void prepare(int64_t tokens, int64_t warp_rows, int64_t row_warps) {
  for (bool gated : {false, true}) {
    Kernel k = find(tokens, warp_rows, row_warps, gated);
    TVM_FFI_ICHECK(k.function) << "no such tile";
    check(cudaFuncSetAttribute(k.function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory()));
  }
}

// x[T, K], weight[N, K / 4] of 16-bit words, scale and zero[groups, N], bias[rows], residual and out[T, rows], all
// contiguous; N = rows, or 2 * rows where gated. The tile must have been prepared.
void int4_linear(TensorView out, TensorView x, TensorView weight, TensorView scale, Optional<TensorView> zero,
                 Optional<TensorView> bias, Optional<TensorView> residual, bool gated, int64_t tokens,
                 int64_t warp_rows, int64_t row_warps, int64_t teams, int64_t split, int64_t stages) {
  ffi::CUDADeviceGuard guard(x.device().device_id);
  Kernel k = find(tokens, warp_rows, row_warps, gated);
  int64_t inner = x.size(1), rows = out.size(1), groups = scale.size(0);
  TVM_FFI_ICHECK(zero.has_value() == kZero) << "this module is for weights with" << (kZero ? "" : "out") << " zero points";
  TVM_FFI_ICHECK(groups == 1 ? kParts == 1 : groups * 128 == inner * kParts)
      << "this module is for groups of " << 128 / kParts << ", not for " << groups << " groups of " << inner << " columns";
  TVM_FFI_ICHECK(fits(tokens, warp_rows, row_warps, teams, stages) && split > 0 && split <= 8 && split * 128 <= inner)
      << "no tile of " << tokens << " tokens with " << teams << " x " << row_warps << " warps of " << warp_rows << " rows, "
      << stages << " stages and a split of " << split;
  TVM_FFI_ICHECK(inner % 128 == 0 && rows % k.rows == 0) << "the tile does not divide a weight of " << rows << " x " << inner;
  Params p = {};
  p.weight = static_cast<uint8_t const*>(weight.data_ptr());
  p.scale = static_cast<Element const*>(scale.data_ptr());
  p.zero = kZero ? static_cast<uint8_t const*>(zero.value().data_ptr()) : nullptr;
  p.x = static_cast<Element const*>(x.data_ptr());
  p.bias = elements(bias), p.residual = elements(residual);
  p.out = static_cast<Element*>(out.data_ptr());
  p.tokens = x.size(0), p.rows = rows, p.blocks = inner / 128;
  p.groups_per_block = groups == 1 ? 0 : kParts;
  p.split = split, p.stages = stages;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(split), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows / k.rows * split, (p.tokens + tokens - 1) / tokens);
  config.blockDim = dim3(32 * k.team_warps * teams);
  config.dynamicSmemBytes = k.bytes(teams, stages);
  config.stream = get_stream(x.device());
  config.attrs = attributes, config.numAttrs = split > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, k.function, p));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fits, fits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(int4_linear, int4_linear);
