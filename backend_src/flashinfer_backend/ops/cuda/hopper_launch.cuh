// SPDX-License-Identifier: Apache-2.0
// How kernels for Hopper are launched: the copy engine's maps of tensors, and a start before the previous kernel's end.
#pragma once

#include <cuda.h>

#include "tvm_ffi_utils.h"

namespace {

using tvm::ffi::Optional;

template <typename T> T const* elements(Optional<TensorView> const& tensor) {
  return tensor.has_value() ? static_cast<T const*>(tensor.value().data_ptr()) : nullptr;
}
inline void check(cudaError_t error) { TVM_FFI_ICHECK(error == cudaSuccess) << cudaGetErrorString(error); }

// dims: of the tensor, the fastest first; strides: bytes, of all but the first; box: of a copy. lines: that L2 brings.
inline CUtensorMap tensor_map(CUtensorMapDataType type, TensorView const& tensor, int rank, uint64_t const* dims,
                              uint64_t const* strides, uint32_t const* box, CUtensorMapSwizzle swizzle,
                              CUtensorMapL2promotion lines = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static auto const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    TVM_FFI_ICHECK(function != nullptr) << "the CUDA driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  uint32_t const ones[4] = {1, 1, 1, 1};
  CUresult result = encode(&map, type, rank, tensor.data_ptr(), dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           swizzle, lines, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS) << "cuTensorMapEncodeTiled failed with code " << int(result);
  return map;
}

// Launches a kernel that starts before the previous one has ended, in clusters of `size` blocks.
template <typename Params> class Launch {
 public:
  Launch(void (*kernel)(Params), int threads, int bytes, int size, cudaStream_t stream) : kernel_(kernel), size_(size) {
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim = {unsigned(size), 1, 1};
    config_.blockDim = dim3(threads);
    config_.dynamicSmemBytes = bytes;
    config_.stream = stream;
    config_.attrs = attributes_, config_.numAttrs = size > 1 ? 2 : 1;
  }

  // Clusters that run at a time.
  int clusters() {
    int count, device;
    if (size_ == 1) {
      check(cudaGetDevice(&device));
      check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
      return count;
    }
    cudaLaunchConfig_t config = config_;
    config.gridDim = dim3(size_), config.attrs = attributes_ + 1, config.numAttrs = 1;
    check(cudaOccupancyMaxActiveClusters(&count, kernel_, &config));
    TVM_FFI_ICHECK(count > 0) << "no room for a cluster of " << size_ << " blocks";
    return count;
  }

  void start(int64_t clusters, Params const& p) {
    config_.gridDim = dim3(clusters * size_);
    check(cudaLaunchKernelEx(&config_, kernel_, p));
  }

 private:
  void (*kernel_)(Params);
  int size_;
  cudaLaunchAttribute attributes_[2];
  cudaLaunchConfig_t config_ = {};
};

}  // namespace
