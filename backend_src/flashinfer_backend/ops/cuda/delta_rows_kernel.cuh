// SPDX-License-Identifier: Apache-2.0
// A gated delta net layer's decode rows on Hopper, for heads of 128 and a convolution of 4 inputs: what
// ops/triton_delta.py's _decode_rows does where tokens are pending.
//
// The time is that of reading the states, 64 KiB each. A block goes through heads of rows; one thread brings their
// states to a ring in shared memory, so that memory is busy while others compute. Two groups of four warps take turns
// to prepare a head's query, key, value and gates, and eight warps do the rest.
#pragma once

#include "hopper.cuh"

namespace {

constexpr int kDim = 128, kPending = 8, kTaps = 4;  // of a head; ops.triton_delta.MOST_PENDING; of the convolution
constexpr int kVectors = kPending * kDim;           // pending keys of a head, or what they wrote
constexpr int kStageBytes = (kDim * kDim + 2 * kVectors) * 4;
constexpr int kMostStages = 3;
constexpr int kWorkers = 256, kThreads = kWorkers + 2 * 128 + 32;
constexpr int kAllWorkers = 3, kHalfWorkers = 4;  // named barriers; 1 and 2 are the preparing groups'
constexpr float kLengthEps = 1e-6f;               // ops.torch_delta.L2_EPS

// What the rows of a layer are, with drafts or without.
template <typename T> struct Rows {
  T const *qkv, *z, *a, *b, *conv, *norm;
  float const *a_log, *dt_bias;
  float* recurrent;
  T *inputs, *out;
  int const *slots, *starts, *first;
  int heads, share;
  int64_t qkv_stride, z_stride, a_stride, b_stride;
  float eps;
};

template <typename T> struct Params : Rows<T> {  // starts: null where each row has a token
  float *keys, *written, *decays;
  int* begun;
  int rows, stages;
};

// Of a token and a head. left: what the decay since then leaves of pending tokens, 0 of those that are none. kept: the
// same of the state. qk: the query's product with the key.
struct alignas(16) Entry {
  float q[kDim], k[kDim], v[kDim], gate[kDim];
  float left[kPending];
  float kept, total, beta, qk;
  int slot, place, begin;
};

struct Shared {
  Entry entries[2];                // by group that prepares
  float sums[2][2][2][kDim];       // of heads in turn, halves of keys: what the state answers to key and query
  float2 pending[2][kPending];     // the same: what a pending key answers, with `left`
  float written[kDim];             // what the token writes, where the state is written
  float squares[4], lengths[2][4][3];  // of warps: of results, to norm them; of queries and keys, by group
  alignas(8) uint64_t full[kMostStages], empty[kMostStages], ready[2], taken[2];
};

__device__ __forceinline__ float wide(nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float wide(half x) { return __half2float(x); }
template <typename T> __device__ __forceinline__ T rounded(float x) {
  if constexpr (std::is_same_v<T, half>) return __float2half_rn(x);
  else return __float2bfloat16_rn(x);
}
__device__ __forceinline__ float swish(float x) { return x / (1.0f + __expf(-x)); }
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}
__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ void add(float4& sum, float factor, float4 x) {
  sum.x += factor * x.x, sum.y += factor * x.y, sum.z += factor * x.z, sum.w += factor * x.w;
}
__device__ __forceinline__ uint32_t shared_address(void const* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void workers_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Goes through a block's heads of rows: head `item` of all, the index-th of the block.
struct Turn {
  int heads, items, item, index = 0, row, head;
  template <typename T> __device__ __forceinline__ Turn(Params<T> const& p) : heads(p.heads), item(blockIdx.x) {
    // Rows without a token are the last ones, and the others have one.
    items = (p.starts ? p.starts[p.rows] - p.starts[0] : p.rows) * heads;
    place();
  }
  __device__ __forceinline__ void place() { row = item / heads, head = item - row * heads; }
  __device__ __forceinline__ bool more() const { return item < items; }
  __device__ __forceinline__ void next(int count = 1) { index += count, item += count * gridDim.x, place(); }
};

template <typename T> __device__ __forceinline__ void load_states(Params<T> const& p, float* stages, Shared& shared) {
  uint64_t once = read_once();
  for (Turn turn(p); turn.more(); turn.next()) {
    int stage = turn.index % p.stages, use = turn.index / p.stages;
    int slot = p.slots[turn.row], place = p.first[turn.row], written = (place + turn.head) % kPending * kDim * 4;
    int64_t state = int64_t(slot) * p.heads + turn.head, keys = int64_t(slot) * (p.heads / p.share) + turn.head / p.share;
    uint32_t to = shared_address(stages) + stage * kStageBytes, full = shared_address(&shared.full[stage]);
    if (use > 0) barrier_wait(shared_address(&shared.empty[stage]), (use - 1) & 1);
    if (place == 0) {  // nothing is behind it: the start of a sequence, or padding
      barrier_arrive(full);
      continue;
    }
    barrier_expect(full, kStageBytes - kVectors * 4 + written);
    load_bytes(to, p.recurrent + state * (kDim * kDim), full, kDim * kDim * 4, once);
    load_bytes(to + kDim * kDim * 4, p.keys + keys * kVectors, full, kVectors * 4);
    if (written) load_bytes(to + (kDim * kDim + kVectors) * 4, p.written + state * kVectors, full, written, once);
  }
}

// A group's thread has one value each of the query, the key and the value.
template <typename T> __device__ __forceinline__ void prepare(Params<T> const& p, Shared& shared, int group) {
  int c = threadIdx.x % 128, warp = c / 32, lane = c % 32;
  int key_channels = p.heads / p.share * kDim, channels = 2 * key_channels + p.heads * kDim;
  int kept_channels = channels + 2 * p.heads;
  Turn turn(p);
  if (group) turn.next();
  for (; turn.more(); turn.next(2)) {
    int row = turn.row, head = turn.head, slot = p.slots[row], place = p.first[row];
    int64_t state = int64_t(slot) * p.heads + head;
    int channel[3];
    channel[0] = head / p.share * kDim + c, channel[1] = key_channels + channel[0];
    channel[2] = 2 * key_channels + head * kDim + c;
    T* inputs = p.inputs + int64_t(slot) * (kTaps * kept_channels);
    T own[3], past[3][kTaps - 1];
    uint2 taps[3];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      own[part] = p.qkv[row * p.qkv_stride + channel[part]];
      taps[part] = *reinterpret_cast<uint2 const*>(p.conv + channel[part] * kTaps);
#pragma unroll
      for (int tap = 0; tap < kTaps - 1; ++tap) {
        int at = place - (kTaps - 1) + tap;
        past[part][tap] = at < 0 ? rounded<T>(0.0f) : inputs[at % kTaps * kept_channels + channel[part]];
      }
    }
    int now = (place + head) % kPending, begin = place > 0 ? max(p.begun[state], place - now) : 0;
    float decay_then = p.decays[state * kPending + lane % kPending];
    float total = begin < place ? p.decays[state * kPending + now - 1] : 0.0f;
    float step = wide(p.a[row * p.a_stride + head]) + p.dt_bias[head], beta = wide(p.b[row * p.b_stride + head]);
    float gate = wide(p.z[row * p.z_stride + head * kDim + c]);
    step = step > 20.0f ? step : log1pf(__expf(fminf(step, 20.0f)));
    total -= __expf(p.a_log[head]) * step;
    float values[3];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      T const* weights = reinterpret_cast<T const*>(&taps[part]);
      float sum = 0.0f;
#pragma unroll
      for (int tap = 0; tap < kTaps - 1; ++tap) sum += wide(past[part][tap]) * wide(weights[tap]);
      sum += wide(own[part]) * wide(weights[kTaps - 1]);
      values[part] = wide(rounded<T>(swish(sum)));
      if (part == 2 || head % p.share == 0) inputs[place % kTaps * kept_channels + channel[part]] = own[part];
    }
    float q = values[0], k = values[1], qq = warp_sum(q * q), kk = warp_sum(k * k), qk = warp_sum(q * k);
    if (lane == 0) {
      float* length = shared.lengths[group][warp];
      length[0] = qq, length[1] = kk, length[2] = qk;
    }
    group_barrier(group);
    qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (int other = 0; other < 4; ++other) {
      float const* length = shared.lengths[group][other];
      qq += length[0], kk += length[1], qk += length[2];
    }
    float of_q = rsqrtf(qq + kLengthEps) * rsqrtf(float(kDim)), of_k = rsqrtf(kk + kLengthEps);
    int use = turn.index / 2;
    if (use > 0) barrier_wait(shared_address(&shared.taken[group]), (use - 1) & 1);
    Entry& entry = shared.entries[group];
    entry.q[c] = q * of_q, entry.k[c] = k * of_k, entry.v[c] = values[2], entry.gate[c] = swish(gate);
    if (c < kPending) {
      bool pending = c < now && place - now + c >= begin;
      entry.left[c] = pending ? __expf(total - decay_then) : 0.0f;
    }
    if (c == 0) {
      entry.kept = __expf(total), entry.total = total, entry.beta = 1.0f / (1.0f + __expf(-beta));
      entry.qk = qk * of_q * of_k, entry.slot = slot, entry.place = place, entry.begin = begin;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.ready[group]));
    group_barrier(group);  // all have read the lengths
  }
}

template <typename T> __device__ __forceinline__ void answer(Params<T> const& p, float const* stages, Shared& shared) {
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  float norm = thread < kDim ? wide(p.norm[thread]) : 0.0f;
  for (Turn turn(p); turn.more(); turn.next()) {
    int stage = turn.index % p.stages, group = turn.index & 1;
    float const* state = stages + stage * (kStageBytes / 4);
    float const *keys = state + kDim * kDim, *written = keys + kVectors;
    barrier_wait(shared_address(&shared.ready[group]), turn.index / 2 & 1);
    barrier_wait(shared_address(&shared.full[stage]), turn.index / p.stages & 1);
    Entry const& entry = shared.entries[group];
    float kept = entry.kept, left = entry.left[warp];
    int place = entry.place, now = (place + turn.head) % kPending;
    float2 of_pending = {};
    if (left != 0.0f) {  // a warp has one of the pending tokens
      float4 key = reinterpret_cast<float4 const*>(keys + (place - now + warp) % kPending * kDim)[lane];
      of_pending.x = warp_sum(dot(key, reinterpret_cast<float4 const*>(entry.k)[lane])) * left;
      of_pending.y = warp_sum(dot(key, reinterpret_cast<float4 const*>(entry.q)[lane])) * left;
    }
    if (lane == 0) shared.pending[group][warp] = of_pending;
    // A warp has 64 keys and 32 values of the state, a thread 16 of these keys and 4 of the values.
    float4 of_k = {}, of_q = {};
    int half = warp / 4, column = warp % 4 * 32 + lane % 8 * 4, first = half * 64 + lane / 8 * 16;
    if (entry.begin > 0) {
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        float4 k = *reinterpret_cast<float4 const*>(entry.k + first + 4 * four);
        float4 q = *reinterpret_cast<float4 const*>(entry.q + first + 4 * four);
        float const* cell = state + (first + 4 * four) * kDim + column;
        float4 s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = *reinterpret_cast<float4 const*>(cell + i * kDim);
        add(of_k, k.x, s[0]), add(of_k, k.y, s[1]), add(of_k, k.z, s[2]), add(of_k, k.w, s[3]);
        add(of_q, q.x, s[0]), add(of_q, q.y, s[1]), add(of_q, q.z, s[2]), add(of_q, q.w, s[3]);
      }
#pragma unroll
      for (int other = 8; other < 32; other *= 2) {
        of_k.x += __shfl_xor_sync(~0u, of_k.x, other), of_q.x += __shfl_xor_sync(~0u, of_q.x, other);
        of_k.y += __shfl_xor_sync(~0u, of_k.y, other), of_q.y += __shfl_xor_sync(~0u, of_q.y, other);
        of_k.z += __shfl_xor_sync(~0u, of_k.z, other), of_q.z += __shfl_xor_sync(~0u, of_q.z, other);
        of_k.w += __shfl_xor_sync(~0u, of_k.w, other), of_q.w += __shfl_xor_sync(~0u, of_q.w, other);
      }
    }
    if (lane < 8) {
      *reinterpret_cast<float4*>(&shared.sums[group][half][0][column]) = of_k;
      *reinterpret_cast<float4*>(&shared.sums[group][half][1][column]) = of_q;
    }
    workers_barrier(kAllWorkers, kWorkers);
    int64_t cell = int64_t(entry.slot) * p.heads + turn.head;
    bool flush = now == kPending - 1;
    if (thread < kDim) {
      float found = (shared.sums[group][0][0][thread] + shared.sums[group][1][0][thread]) * kept;
      float result = (shared.sums[group][0][1][thread] + shared.sums[group][1][1][thread]) * kept;
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        if (entry.left[i] == 0.0f) continue;  // what is there may be no number
        float2 factors = shared.pending[group][i];
        float then = written[i * kDim + thread];
        found += factors.x * then, result += factors.y * then;
      }
      float own = entry.beta * (entry.v[thread] - found);
      float value = wide(rounded<T>(result + own * entry.qk)), square = warp_sum(value * value);
      if (lane == 0) shared.squares[warp] = square;
      if (flush) shared.written[thread] = own;
      else p.written[cell * kVectors + now * kDim + thread] = own;
      if (turn.head % p.share == 0) {
        int64_t key = int64_t(entry.slot) * (p.heads / p.share) + turn.head / p.share;
        p.keys[key * kVectors + place % kPending * kDim + thread] = entry.k[thread];
      }
      if (thread == 0) {
        if (!flush) p.decays[cell * kPending + now] = entry.total;
        if (flush || place == 0) p.begun[cell] = flush ? place + 1 : 0;
      }
      workers_barrier(kHalfWorkers, kDim);
      square = (shared.squares[0] + shared.squares[1]) + (shared.squares[2] + shared.squares[3]);
      float normed = wide(rounded<T>(value * rsqrtf(square / kDim + p.eps)));
      float scaled = wide(rounded<T>(normed * norm));
      p.out[(int64_t(turn.row) * p.heads + turn.head) * kDim + thread] = rounded<T>(scaled * entry.gate[thread]);
    }
    if (flush) {
      workers_barrier(kAllWorkers, kWorkers);
      float4 own = reinterpret_cast<float4 const*>(shared.written)[lane], then[kPending];
#pragma unroll
      for (int i = 0; i < kPending; ++i) {
        then[i] = {};
        if (entry.left[i] != 0.0f) add(then[i], entry.left[i], reinterpret_cast<float4 const*>(written + i * kDim)[lane]);
      }
      float4* to = reinterpret_cast<float4*>(p.recurrent + cell * (kDim * kDim)) + lane;
#pragma unroll 4
      for (int i = 0; i < kDim / 8; ++i) {
        int key = warp * (kDim / 8) + i;
        float4 s = {};
        if (entry.begin > 0) add(s, kept, reinterpret_cast<float4 const*>(state + key * kDim)[lane]);
#pragma unroll
        for (int j = 0; j < kPending; ++j)
          if (entry.left[j] != 0.0f) add(s, keys[(place - now + j) % kPending * kDim + key], then[j]);
        add(s, entry.k[key], own);
        __stcs(to + key * (kDim / 4), s);
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared_address(&shared.empty[stage]));
      barrier_arrive(shared_address(&shared.taken[group]));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1) delta_rows_kernel(__grid_constant__ Params<T> const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t raw[];
  float* stages = reinterpret_cast<float*>(raw);
  Shared& shared = *reinterpret_cast<Shared*>(raw + p.stages * kStageBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(shared_address(&shared.full[s]), 1);
      barrier_init(shared_address(&shared.empty[s]), kWorkers / 32);
    }
    for (int group = 0; group < 2; ++group) {
      barrier_init(shared_address(&shared.ready[group]), 4);
      barrier_init(shared_address(&shared.taken[group]), kWorkers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role < 2) return answer(p, stages, shared);
  if (role < 4) return prepare(p, shared, role - 2);
  if (threadIdx.x % 32 == 0) load_states(p, stages, shared);
#endif
}

}  // namespace
