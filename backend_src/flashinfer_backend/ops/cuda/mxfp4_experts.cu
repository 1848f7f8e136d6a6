// SPDX-License-Identifier: Apache-2.0
// Launches mxfp4_experts_kernel.cuh and mxfp4_tiles_kernel.cuh, for Python.

#include "hopper_launch.cuh"
#include "mxfp4_tiles_kernel.cuh"

namespace {

template <bool kGated, int kTeams> void launch(Params& p, TensorView x, TensorView weight, TensorView scales) {
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  using L = Layout<kGated, kTeams>;
  uint64_t rows = weight.size(0);
  uint64_t dims[2] = {uint64_t(weight.size(1)), rows}, strides[1] = {uint64_t(weight.size(1))};
  uint32_t box[2] = {kColumns / 2, kRows};
  // Rows do not begin at lines of 256 bytes: with those, 3 % more time.
  p.weight = tensor_map(kBytes, weight, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  uint64_t scale_dims[2] = {uint64_t(p.scale_bytes), rows}, scale_strides[1] = {uint64_t(p.scale_bytes)};
  uint32_t scale_box[2] = {uint32_t(p.scale_bytes), kRows};
  p.scales = tensor_map(kBytes, scales, 2, scale_dims, scale_strides, scale_box, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.x_bytes = L::x_bytes(p.inner), p.stages = L::stages(p.inner, p.scale_bytes);
  TVM_FFI_ICHECK(p.stages >= 2) << "no room for x of " << p.inner << " columns";
  auto kernel = mxfp4_experts_kernel<kGated, kTeams>;
  // Once: a process has one device.
  static cudaError_t const attribute = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  check(attribute);
  Launch<Params> launch(kernel, L::kThreads, L::bytes(p.inner, p.scale_bytes, p.stages), 1, get_stream(x.device()));
  static int const most = launch.clusters();
  launch.start(std::min(int64_t(most), int64_t(p.most) * p.blocks), p);
}

template <bool kGated, int kPairs> void launch_tiles(Params const& few, TensorView x, TensorView weight, TensorView scales) {
  tiles::Params p;
  uint64_t rows = weight.size(0);
  uint64_t dims[2] = {uint64_t(weight.size(1)), rows}, strides[1] = {uint64_t(weight.size(1))};
  uint32_t box[2] = {tiles::kColumns / 2, 64};
  p.weight = tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, weight, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_64B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  p.inner = few.inner, p.rows = few.rows, p.all_rows = rows, p.pairs_a_row = few.pairs_a_row;
  p.most = few.most, p.blocks = (p.rows + (kGated ? 127 : 255)) / (kGated ? 128 : 256), p.apart = few.scale_bytes;
  p.alpha = few.alpha, p.limit = few.limit, p.scales = static_cast<uint8_t const*>(scales.data_ptr());
  p.x = few.x, p.bias = few.bias, p.factors = few.factors;
  p.experts = few.experts, p.filled = few.filled, p.order = few.order, p.out = few.out;
  auto kernel = tiles::kernel<kGated, kPairs>;
  constexpr int kBytes = tiles::Ring<kPairs>::kBytes;
  static cudaError_t const attribute = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  check(attribute);
  Launch<tiles::Params> launch(kernel, tiles::kThreads, kBytes, 1, get_stream(x.device()));
  static int const most = launch.clusters();
  launch.start(std::min(int64_t(most), int64_t(p.most) * p.blocks), p);
}

// x[R, K] bfloat16 times weights in MXFP4, as ops/mxfp4.py packs them: uint8 [E N, K / 2] and scales [E N, S], whose rows
// are S bytes apart in memory, a multiple of 16; gated: of 2 N rows. Tiles: experts [M], filled [M], order [M, 16, 64 or
// 128], int32; teams: of tiles of 16.
// out[P, N] bfloat16; bfloat16 bias of the weight's rows; float32 factors of out's rows. limit 0: silu, not clipped.
void mxfp4_experts(TensorView out, TensorView x, TensorView weight, TensorView scales, Optional<TensorView> bias,
                   Optional<TensorView> factors, TensorView experts, TensorView filled, TensorView order, bool gated,
                   int64_t pairs_a_row, double alpha, double limit, int64_t teams) {
  ffi::CUDADeviceGuard guard(x.device().device_id);
  Params p;
  p.inner = x.size(1), p.rows = out.size(1), p.pairs_a_row = pairs_a_row;
  p.most = experts.size(0), p.blocks = (p.rows + kRows - 1) / kRows, p.scale_bytes = scales.stride(0);
  p.alpha = alpha, p.limit = limit;
  p.x = static_cast<nv_bfloat16 const*>(x.data_ptr()), p.bias = elements<nv_bfloat16>(bias);
  p.factors = elements<float>(factors), p.out = static_cast<nv_bfloat16*>(out.data_ptr());
  p.experts = static_cast<int const*>(experts.data_ptr()), p.filled = static_cast<int const*>(filled.data_ptr());
  p.order = static_cast<int const*>(order.data_ptr());
  TVM_FFI_ICHECK(encode_dlpack_dtype(x.dtype()) == bfloat16_code && x.IsContiguous() &&
                 (!bias.has_value() || encode_dlpack_dtype(bias.value().dtype()) == bfloat16_code) &&
                 x.size(0) * pairs_a_row >= out.size(0))
      << "x and the bias should be in bfloat16, x without gaps, with a row for every " << pairs_a_row << " of "
      << out.size(0) << " pairs";
  TVM_FFI_ICHECK(p.inner % 8 == 0 && 2 * weight.size(1) >= p.inner && 2 * weight.size(1) < p.inner + 64 &&
                 weight.size(0) % (gated ? 2 * p.rows : p.rows) == 0 && scales.size(0) == weight.size(0))
      << "a weight [" << weight.size(0) << ", " << 2 * weight.size(1) << "] with scales of " << scales.size(0)
      << " rows for x of " << p.inner << " columns and " << p.rows << " columns of results";
  bool many = order.size(1) == 64 || order.size(1) == 128;
  TVM_FFI_ICHECK(p.scale_bytes % 16 == 0 && p.scale_bytes <= 256 && (many || order.size(1) == kPairs))
      << "scales " << p.scale_bytes << " bytes apart, tiles of " << order.size(1);
  TVM_FFI_ICHECK(x.size(0) * x.size(1) < int64_t(1) << 31) << "x has too many elements";
#define TILES(G, N) if (gated == G && order.size(1) == N) return launch_tiles<G, N>(p, x, weight, scales);
  TILES(true, 64) TILES(false, 64) TILES(true, 128) TILES(false, 128)
#undef TILES
#define TEAMS(G, T) if (gated == G && teams == T) return launch<G, T>(p, x, weight, scales);
  TEAMS(true, 1) TEAMS(false, 1) TEAMS(true, 2) TEAMS(false, 2)
#undef TEAMS
  TVM_FFI_ICHECK(false) << "no kernel with " << teams << " teams";
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(mxfp4_experts, mxfp4_experts);
