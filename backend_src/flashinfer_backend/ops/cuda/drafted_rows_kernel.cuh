// SPDX-License-Identifier: Apache-2.0
// A gated delta net layer's rows that can have drafts, on Hopper, for heads of 128 and a convolution of 4 inputs: what
// ops/triton_delta.py's _decode_rows does where tokens are held.
//
// A row's held tokens and its own are one chunk. With S the state before them, G the sum of decays up to a token, all
// in float32, each writes
//   w[t] = beta[t] (v[t] - exp(G[t]) k[t] S - sum over s < t: exp(G[t] - G[s]) (k[t] k[s]) w[s])
// and answers exp(G[t]) q[t] S + sum over s <= t: exp(G[t] - G[s]) (q[t] k[s]) w[s]; https://arxiv.org/abs/2412.06464.
// So the state is read once, all that a row needs is loaded at once, and nothing waits for the token before but w.
#pragma once

#include "delta_rows_kernel.cuh"

namespace {
namespace drafted {

constexpr int kThreads = 4 * 128;  // a query's, a key's and a value's channel each, and a result; all have of the state
constexpr int kWarps = kThreads / 32, kKeys = kDim / kWarps;  // keys of a warp

template <typename T> struct Params : Rows<T> {
  int const* held;
  int length;  // tokens of `inputs`
};

// Of up to kMost tokens, half of them held. With 8 two blocks share an SM.
template <int kMost> struct Shared {
  static constexpr int kOwn = kMost / 2;
  float q[kOwn][kDim], k[kMost][kDim], v[kMost][kDim];  // as the convolution leaves them; of v, then w
  float answers[kWarps][kMost + kOwn][kDim];            // of warps, their keys': what the state answers to k and q
  float system[kMost][kMost], scores[kOwn][kMost];      // factors of w[s] in w[t] and in answers
  float lengths[2][kMost][4], squares[kOwn][4];         // of warps
  float total[kMost], beta[kMost], of_k[kMost], of_q[kOwn];
};

template <typename T, int kMost>
__global__ void __launch_bounds__(kThreads, kMost == 8 ? 2 : 1) drafted_rows_kernel(__grid_constant__ Params<T> const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shared<kMost>;
  constexpr int kOwn = S::kOwn;
  extern __shared__ __align__(128) uint8_t raw[];
  S& shared = *reinterpret_cast<S*>(raw);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  int row = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  int part = threadIdx.x / 128, c = threadIdx.x % 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int start = p.starts[row], own = p.starts[row + 1] - start;
  int slot = p.slots[row], place = p.first[row], held = p.held[row], count = held + own;
  if (own == 0) return;  // padding
  int key_channels = p.heads / p.share * kDim, channels = 2 * key_channels + p.heads * kDim;
  int kept = channels + 2 * p.heads;
  int channel = part >= 2 ? 2 * key_channels + head * kDim + c : part * key_channels + head / p.share * kDim + c;
  T* inputs = p.inputs + int64_t(slot) * p.length * kept;
  float* cells = p.recurrent + (int64_t(slot) * p.heads + head) * (kDim * kDim) + warp * kKeys * kDim + 4 * lane;

  // All loads first. given[i]: of the position three before the first token, and i, which may be no position.
  int begin = place - held, line = (begin - (kTaps - 1) + p.length) % p.length;
  T const* source = p.qkv + int64_t(start - held) * p.qkv_stride + channel;
  T given[kMost + kTaps - 1];
#pragma unroll
  for (int i = 0; i < kMost + kTaps - 1; ++i) {
    int t = i - (kTaps - 1);
    T const* from = t < held ? inputs + (line + i < p.length ? line + i : line + i - p.length) * kept + channel
                             : source + t * p.qkv_stride;
    given[i] = part < 3 && t < count && begin + t >= 0 ? *from : rounded<T>(0.0f);
  }
  uint2 taps = *reinterpret_cast<uint2 const*>(p.conv + channel * kTaps);
  float4 state[kKeys] = {};
  if (held < place) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) state[i] = __ldcs(reinterpret_cast<float4 const*>(cells + i * kDim));
  }
  float gates[kOwn] = {}, norm = 0.0f;
  if (part == 3) {
    norm = wide(p.norm[c]);
#pragma unroll
    for (int t = 0; t < kOwn; ++t)
      if (t < own) gates[t] = wide(p.z[(start + t) * p.z_stride + head * kDim + c]);
  }
  if (warp == kWarps - 1) {  // a lane has a token
    float decay = 0.0f, beta = 0.0f;
    if (lane < count) {
      int position = place - held + lane;
      T *then = inputs + position % p.length * kept + channels + head, a, b;
      if (lane < held) {
        a = then[0], b = then[p.heads];
      } else {
        a = p.a[(start + lane - held) * p.a_stride + head], b = p.b[(start + lane - held) * p.b_stride + head];
        then[0] = a, then[p.heads] = b;
      }
      float step = wide(a) + p.dt_bias[head];
      step = step > 20.0f ? step : log1pf(__expf(fminf(step, 20.0f)));
      decay = -__expf(p.a_log[head]) * step, beta = 1.0f / (1.0f + __expf(-wide(b)));
    }
#pragma unroll
    for (int before = 1; before < kMost; before *= 2) {
      float other = __shfl_up_sync(~0u, decay, before);
      if (lane >= before) decay += other;
    }
    if (lane < kMost) shared.total[lane] = decay, shared.beta[lane] = beta;
  }

  T const* weights = reinterpret_cast<T const*>(&taps);
#pragma unroll
  for (int t = 0; t < kMost; ++t) {
    if (part == 3 || t >= count || (part == 0 && t < held)) continue;
    float sum = 0.0f;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) sum += wide(given[t + tap]) * wide(weights[tap]);
    sum = wide(rounded<T>(swish(sum)));
    if (part == 0) shared.q[t - held][c] = sum;
    else if (part == 1) shared.k[t][c] = sum;
    else shared.v[t][c] = sum;
    if (part < 2) {
      float square = warp_sum(sum * sum);
      if (lane == 0) shared.lengths[part][part == 0 ? t - held : t][warp % 4] = square;
    }
    if (t >= held && (part == 2 || head % p.share == 0)) {
      int to = line + t + kTaps - 1;
      inputs[(to < p.length ? to : to - p.length) * kept + channel] = given[t + kTaps - 1];
    }
  }
  __syncthreads();

  // A warp has 8 keys of the state, a thread 4 of its values.
  auto ask = [&](float const* of, int to) {
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kKeys; i += 4) {
      float4 four = *reinterpret_cast<float4 const*>(of + warp * kKeys + i);
      add(sum, four.x, state[i]), add(sum, four.y, state[i + 1]);
      add(sum, four.z, state[i + 2]), add(sum, four.w, state[i + 3]);
    }
    *reinterpret_cast<float4*>(&shared.answers[warp][to][4 * lane]) = sum;
  };
#pragma unroll 2
  for (int t = 0; t < count; ++t) ask(shared.k[t], t);
#pragma unroll 2
  for (int t = 0; t < own; ++t) ask(shared.q[t], kMost + t);

  // Products of tokens, a row of keys or queries at a time; a lane keeps that of its token.
  auto scale = [&](float const* of) { return rsqrtf((of[0] + of[1]) + (of[2] + of[3]) + kLengthEps); };
  for (int of = warp; of < count + own; of += kWarps) {
    bool asks = of >= count;
    int t = asks ? held + of - count : of, columns = asks ? t + 1 : t;
    float4 left = reinterpret_cast<float4 const*>(asks ? shared.q[t - held] : shared.k[t])[lane];
    float product = 0.0f;
#pragma unroll 4
    for (int s = 0; s < columns; ++s) {
      float sum = warp_sum(dot(left, reinterpret_cast<float4 const*>(shared.k[s])[lane]));
      if (lane == s) product = sum;
    }
    float factor = asks ? scale(shared.lengths[0][t - held]) * rsqrtf(float(kDim)) : scale(shared.lengths[1][t]);
    if (lane == 0) (asks ? shared.of_q[t - held] : shared.of_k[t]) = factor;
    if (lane < columns) {
      product *= factor * scale(shared.lengths[1][lane]) * __expf(shared.total[t] - shared.total[lane]);
      if (asks) shared.scores[t - held][lane] = product;
      else shared.system[t][lane] = product * shared.beta[t];
    }
  }
  __syncthreads();

  for (int of = part; of < count + own; of += kThreads / 128) {
    bool asks = of >= count;
    int t = asks ? of - count : of, to = asks ? kMost + t : t;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += shared.answers[other][to][c];
    sum *= asks ? shared.of_q[t] * __expf(shared.total[held + t]) : shared.of_k[t] * __expf(shared.total[t]);
    shared.answers[0][to][c] = asks ? sum : shared.beta[t] * (shared.v[t][c] - sum);
  }
  __syncthreads();

  if (part == 0) {
    float written[kMost];
#pragma unroll
    for (int t = 0; t < kMost; ++t) written[t] = t < count ? shared.answers[0][t][c] : 0.0f;
#pragma unroll
    for (int t = 0; t < kMost; ++t) {
      if (t >= count) continue;
#pragma unroll
      for (int s = 0; s < t; ++s) written[t] -= shared.system[t][s] * written[s];
      shared.v[t][c] = written[t];
    }
  }
  __syncthreads();

  if (held > 0 || place == 0) {  // the state behind the held tokens
    float total = held > 0 ? shared.total[held - 1] : 0.0f, left = __expf(total);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) state[i].x *= left, state[i].y *= left, state[i].z *= left, state[i].w *= left;
    for (int s = 0; s < held; ++s) {
      float4 written = *reinterpret_cast<float4 const*>(&shared.v[s][4 * lane]);
      float factor = shared.of_k[s] * __expf(total - shared.total[s]);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) add(state[i], shared.k[s][warp * kKeys + i] * factor, written);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) __stcs(reinterpret_cast<float4*>(cells + i * kDim), state[i]);
  }
  if (part == 3) {
    float values[kOwn];
#pragma unroll
    for (int t = 0; t < kOwn; ++t) values[t] = t < own ? shared.answers[0][kMost + t][c] : 0.0f;
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      float written = s < count ? shared.v[s][c] : 0.0f;
#pragma unroll
      for (int t = 0; t < kOwn; ++t)
        if (t < own && s <= held + t) values[t] += shared.scores[t][s] * written;
    }
#pragma unroll
    for (int t = 0; t < kOwn; ++t) {
      values[t] = wide(rounded<T>(values[t]));
      float square = warp_sum(values[t] * values[t]);
      if (lane == 0) shared.squares[t][warp % 4] = square;
    }
    group_barrier(part);
#pragma unroll
    for (int t = 0; t < kOwn; ++t) {
      if (t >= own) continue;
      float const* of = shared.squares[t];
      float normed = wide(rounded<T>(values[t] * rsqrtf(((of[0] + of[1]) + (of[2] + of[3])) / kDim + p.eps)));
      float scaled = wide(rounded<T>(normed * norm));
      p.out[(int64_t(start + t) * p.heads + head) * kDim + c] = rounded<T>(scaled * swish(gates[t]));
    }
  }
#endif
}

}  // namespace drafted
}  // namespace
