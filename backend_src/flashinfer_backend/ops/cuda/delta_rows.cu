// SPDX-License-Identifier: Apache-2.0
// Launches delta_rows_kernel.cuh and drafted_rows_kernel.cuh, for Python.

#include "drafted_rows_kernel.cuh"
#include "hopper_launch.cuh"

namespace {

using tvm::ffi::Optional;

template <typename T> T* data(TensorView const& tensor) { return static_cast<T*>(tensor.data_ptr()); }

// Fills in what both kernels take, and checks it: inputs of `length` tokens.
template <typename T>
void describe(Rows<T>& p, TensorView out, TensorView qkv, TensorView z, TensorView a, TensorView b, TensorView conv,
              TensorView a_log, TensorView dt_bias, TensorView norm, double eps, TensorView recurrent, TensorView inputs,
              TensorView slots, TensorView first, int64_t length) {
  p.qkv = data<T>(qkv), p.z = data<T>(z), p.a = data<T>(a), p.b = data<T>(b), p.conv = data<T>(conv);
  p.norm = data<T>(norm), p.a_log = data<float>(a_log), p.dt_bias = data<float>(dt_bias);
  p.recurrent = data<float>(recurrent), p.inputs = data<T>(inputs), p.out = data<T>(out);
  p.slots = data<int>(slots), p.first = data<int>(first), p.eps = eps;
  p.qkv_stride = qkv.stride(0), p.z_stride = z.stride(0), p.a_stride = a.stride(0), p.b_stride = b.stride(0);
  p.heads = recurrent.size(1);
  TVM_FFI_ICHECK(recurrent.size(2) == kDim && recurrent.size(3) == kDim && conv.size(1) == kTaps &&
                 inputs.size(1) == length && inputs.size(2) == qkv.size(1) + 2 * p.heads)
      << "heads of " << recurrent.size(2) << " and " << recurrent.size(3) << ", a convolution of " << conv.size(1)
      << " inputs, " << inputs.size(1) << " tokens kept: should be 128, 128, 4 and " << length;
  TVM_FFI_ICHECK(qkv.stride(1) == 1 && z.stride(1) == 1 && a.stride(1) == 1 && b.stride(1) == 1)
      << "qkv, z, a and b should lie densely within a row";
  p.share = p.heads / ((qkv.size(1) / kDim - p.heads) / 2);
}

// The first `rows` rows of ops.torch_delta.delta_net, each of one token, with tokens pending: out[T, Hv 128],
// qkv[T, C], z[T, Hv 128], a, b[T, Hv], conv[C, 4], norm[128] of 16 bits; a_log, dt_bias[Hv] float32; states as of
// DeltaStates and Pending; slots, starts and first as of DeltaRows, int32. starts: where the last of these rows can
// have no tokens. Only qkv, z, a and b can have strides, of rows.
template <typename T>
void launch(TensorView out, TensorView qkv, TensorView z, TensorView a, TensorView b, TensorView conv, TensorView a_log,
            TensorView dt_bias, TensorView norm, double eps, TensorView recurrent, TensorView inputs, TensorView keys,
            TensorView written, TensorView decays, TensorView begun, TensorView slots, Optional<TensorView> starts,
            TensorView first, int64_t rows) {
  ffi::CUDADeviceGuard guard(out.device().device_id);
  Params<T> p;
  describe(p, out, qkv, z, a, b, conv, a_log, dt_bias, norm, eps, recurrent, inputs, slots, first, kTaps);
  p.keys = data<float>(keys), p.written = data<float>(written), p.decays = data<float>(decays), p.begun = data<int>(begun);
  p.starts = starts.has_value() ? data<int>(starts.value()) : nullptr;
  p.rows = rows;
  TVM_FFI_ICHECK(written.size(2) == kPending) << written.size(2) << " pending tokens: should be " << kPending;
  auto kernel = delta_rows_kernel<T>;
  constexpr int kShared = kMostStages * kStageBytes + sizeof(Shared);
  // Once: a process has one device.
  static cudaError_t const attribute = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  check(attribute);
  static int const blocks = Launch<Params<T>>(kernel, kThreads, kShared, 1, nullptr).clusters();
  int items = rows * p.heads, each = (items + blocks - 1) / blocks;
  p.stages = each < kMostStages ? each : kMostStages;
  Launch<Params<T>> launch(kernel, kThreads, p.stages * kStageBytes + sizeof(Shared), 1, get_stream(out.device()));
  launch.start(items < blocks ? items : blocks, p);
}

template <typename T, int kMost> void start_drafted(drafted::Params<T> const& p, int64_t blocks, cudaStream_t stream) {
  auto kernel = drafted::drafted_rows_kernel<T, kMost>;
  constexpr int kShared = sizeof(drafted::Shared<kMost>);
  static cudaError_t const attribute = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  check(attribute);
  Launch<drafted::Params<T>>(kernel, drafted::kThreads, kShared, 1, stream).start(blocks, p);
}

// The same of rows of up to `most` tokens, at most 8, and as many that are held[rows], without pending tokens.
template <typename T>
void launch_drafted(TensorView out, TensorView qkv, TensorView z, TensorView a, TensorView b, TensorView conv,
                    TensorView a_log, TensorView dt_bias, TensorView norm, double eps, TensorView recurrent,
                    TensorView inputs, TensorView slots, TensorView starts, TensorView first, TensorView held,
                    int64_t rows, int64_t most) {
  ffi::CUDADeviceGuard guard(out.device().device_id);
  TVM_FFI_ICHECK(most <= 8) << "rows of " << most << " tokens: should be 8 at most";
  drafted::Params<T> p;
  p.length = kTaps + 2 * most - 1;
  describe(p, out, qkv, z, a, b, conv, a_log, dt_bias, norm, eps, recurrent, inputs, slots, first, p.length);
  p.starts = data<int>(starts), p.held = data<int>(held);
  auto start = most <= 4 ? start_drafted<T, 8> : start_drafted<T, 16>;
  start(p, rows * p.heads, get_stream(out.device()));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(delta_rows_bf16, launch<nv_bfloat16>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(delta_rows_f16, launch<half>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drafted_rows_bf16, launch_drafted<nv_bfloat16>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drafted_rows_f16, launch_drafted<half>);
