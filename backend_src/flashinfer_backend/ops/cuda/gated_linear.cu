// SPDX-License-Identifier: Apache-2.0
// Launches gated_linear_kernel.cuh, for Python.

#include <algorithm>

#include "gated_linear_kernel.cuh"
#include "hopper_launch.cuh"

namespace {

constexpr CUtensorMapDataType kOut = kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
constexpr CUtensorMapDataType kIn = kFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kOut;

struct Scales {
  float const *x = nullptr, *weight = nullptr;
};

template <int kTokens> void launch(TensorView out, TensorView x, TensorView weight, Scales scales, int64_t sms) {
  uint64_t tokens = x.size(0), columns = out.size(1), inner = x.size(1), row = inner * sizeof(Element);  // bytes
  Params p;
  uint64_t weight_dims[4] = {inner, 8, 2, columns / 8}, weight_strides[3] = {row, columns * row, 8 * row};
  uint64_t x_dims[2] = {inner, tokens}, x_strides[1] = {row};
  uint64_t out_dims[2] = {columns, tokens}, out_strides[1] = {columns * 2};
  uint32_t weight_box[4] = {kInner, 8, 2, kRows / 16}, x_box[2] = {kInner, kTokens}, out_box[2] = {32, kTokens};
  p.x_scales = scales.x, p.scales = scales.weight, p.tokens = tokens;
  p.weight = tensor_map(kIn, weight, 4, weight_dims, weight_strides, weight_box, CU_TENSOR_MAP_SWIZZLE_128B);
  p.x = tensor_map(kIn, x, 2, x_dims, x_strides, x_box, CU_TENSOR_MAP_SWIZZLE_128B);
  p.out = tensor_map(kOut, out, 2, out_dims, out_strides, out_box, CU_TENSOR_MAP_SWIZZLE_64B);
  p.steps = inner / kInner, p.row_tiles = 2 * columns / kRows, p.token_tiles = (tokens + kTokens - 1) / kTokens;

  using L = Layout<kTokens>;
  static cudaError_t const attribute = cudaFuncSetAttribute(
      gated_linear_kernel<kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  check(attribute);
  Launch<Params> launch(gated_linear_kernel<kTokens>, kThreads, L::kBytes, 1, get_stream(x.device()));
  launch.start(std::min<int64_t>(sms, int64_t(p.row_tiles) * p.token_tiles), p);
}

void run(TensorView out, TensorView x, TensorView weight, Scales scales, int64_t tile, int64_t sms) {
  TVM_FFI_ICHECK(kFp8 == (scales.x != nullptr)) << "gated_linear is for 16 bits, gated_linear_scaled for e4m3";
  ffi::CUDADeviceGuard guard(x.device().device_id);
  switch (tile) {
#define TILE(N) case N: return launch<N>(out, x, weight, scales, sms);
    TILE(64) TILE(80) TILE(96) TILE(112) TILE(128) TILE(144) TILE(160)
    TILE(176) TILE(192) TILE(208) TILE(224) TILE(240) TILE(256)
  }
  TVM_FFI_ICHECK(false) << "no tile of " << tile << " tokens; there are 64 to 256 in steps of 16";
}

// x[T, K], weight[2 I, K], out[T, I], all contiguous; K and I multiples of 64. tile: tokens of a tile.
void gated_linear(TensorView out, TensorView x, TensorView weight, int64_t tile, int64_t sms) {
  run(out, x, weight, {}, tile, sms);
}

// The same of e4m3, K a multiple of 128; float32 x_scales[T], scales[2 I]; out in bfloat16.
void gated_linear_scaled(TensorView out, TensorView x, TensorView weight, TensorView x_scales, TensorView scales,
                         int64_t tile, int64_t sms) {
  run(out, x, weight, {static_cast<float const*>(x_scales.data_ptr()), static_cast<float const*>(scales.data_ptr())},
      tile, sms);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_linear, gated_linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_linear_scaled, gated_linear_scaled);
