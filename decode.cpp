// One decode step on a CPU: each row's last token goes through the whole decoder, and its logits come
// out. decode.py compiles this file and calls decode_step; the arithmetic is model.py's, and so is the
// order of things: norm, attention, norm, MLP, layer after layer.
//
// A step reads each weight once and does little with it, so the time is that of reading. Hence:
//   - one team of threads for the whole step, which waits five times a layer and never ends;
//   - a weight that is read serves all rows of the batch;
//   - what comes 8 KiB later or more is asked for early (by itself the processor fetches ahead only to
//     the end of a page of 4 KiB), into the second cache: the first keeps what is in use.
//
// T is the type of the model (float or BFloat16): the stream, the cache, what one module hands to the
// next. W is that of the matrices (T, or int8_t with a scale for each output). Sums are in fp32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

// ---------------------------------------------------------------- numbers, sixteen at a time

struct BFloat16 {
  uint16_t bits; // the upper half of a float
};

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(4 * LANES)));

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
  uint32_t word = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}
inline float widen(int8_t x) { return x; }

inline void narrow(float x, float &to) { to = x; }
inline void narrow(float x, BFloat16 &to) { // to the nearest, of two equally near the even one
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  uint32_t rounded = word + 0x7fff + ((word >> 16) & 1);
  to.bits = std::isnan(x) ? 0x7fc0 : rounded >> 16;
}
template <class T> float as(float x) { // as the type T has it
  T kept;
  narrow(x, kept);
  return widen(kept);
}

inline Lanes load(const float *from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
#ifdef __AVX512F__ // two instructions each, where g++ makes five and fifty
inline Lanes load(const BFloat16 *from) {
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}
inline Lanes load(const int8_t *from) {
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#else
inline Lanes load(const BFloat16 *from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
  typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}
inline Lanes load(const int8_t *from) {
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Lanes);
}
#endif
inline void store(Lanes lanes, float *to) { std::memcpy(to, &lanes, sizeof lanes); }

inline float total(Lanes lanes) { // by halves: one by one, each addition would wait for the last
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight halves[2];
  std::memcpy(halves, &lanes, sizeof lanes);
  Eight eight = halves[0] + halves[1];
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  Four four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The totals of COUNT vectors, which are overwritten.
template <int COUNT> void totals(Lanes *of, float *out) {
#ifdef __AVX512F__
  if constexpr (COUNT == LANES) {
    // In less than half the instructions: neighbours are added, so that half as many vectors hold twice
    // as many sums each, four times over.
    __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
#pragma GCC unroll 4
    for (int left = LANES / 2; left > 0; left /= 2)
#pragma GCC unroll 8
      for (int i = 0; i < left; i++) {
        auto a = (__m512)of[2 * i], b = (__m512)of[2 * i + 1];
        of[i] = (Lanes)(_mm512_permutex2var_ps(a, even, b) + _mm512_permutex2var_ps(a, odd, b));
      }
    store(of[0], out);
    return;
  }
#endif
  for (int i = 0; i < COUNT; i++)
    out[i] = total(of[i]);
}

// Room for n floats that begins where a cache line does: a load across two lines takes twice as long.
inline float *aligned(std::vector<float> &room, int64_t n) {
  room.resize(n + LANES);
  return (float *)((uintptr_t(room.data()) + 63) / 64 * 64);
}

// e^x to a few units in the last place: 2^n times e^r with r at most ln(2) / 2, by the polynomial of
// Cephes' expf. 0 below -87.
inline Lanes exponential(Lanes x) {
  typedef int32_t Words __attribute__((vector_size(4 * LANES)));
  Lanes limited = x > 88 ? Lanes{} + 88 : x < -87 ? Lanes{} - 87 : x;
  Lanes half = x < 0 ? Lanes{} - 0.5f : Lanes{} + 0.5f;
  Words n = __builtin_convertvector(limited * 1.44269504f + half, Words);
  Lanes whole = __builtin_convertvector(n, Lanes);
  Lanes r = limited - whole * 0.693359375f + whole * 2.12194440e-4f;
  Lanes p = Lanes{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Lanes power = (Lanes)((n + 127) << 23);
  return x < -87 ? Lanes{} : (p * r * r + r + 1) * power;
}

// ------------------------------------------------- what decode.py hands over (the same order)

struct Matrix {
  const void *weight; // (outputs, inputs)
  const void *scale;  // (outputs,) of int8 weights, else null
};

struct Layer {
  const void *input_norm, *q_norm, *k_norm, *post_norm;
  Matrix q, k, v, o, gate, up, down;
  void *keys, *values; // (rows, kv_heads, capacity, head_dim)
};

struct Step {
  int64_t bf16, threads, rows, hidden, heads, kv_heads, head_dim, intermediate, vocab, layers;
  int64_t capacity, slot; // of the cache; where this step's keys go
  double eps;
  const Layer *layer;
  const void *embedding, *norm; // (vocab, hidden), (hidden,)
  Matrix head;
  const int64_t *ids, *positions; // (rows,)
  const float *cos, *sin;         // (positions, head_dim / 2)
  const bool *real;               // (rows, capacity): which slots hold tokens
  void *logits;                   // (rows, vocab)
};

// ------------------------------------------------------------------------------ products

constexpr int64_t AHEAD = 8192; // bytes
constexpr int64_t GRAIN = 8;    // rows that are multiplied together, at most
constexpr int64_t NEAR = 64;    // rows that stay in the caches until all that need them had them

inline void look_ahead(const void *from, int64_t bytes) {
  __builtin_prefetch((const char *)from + bytes, /*for writing*/ 0, /*locality*/ 1);
}

// out[k * N + b] = the dot product of row k of w, (K, n), and row b of x, (N, n)
template <int K, int N, class W> void dots(const W *w, const float *x, int64_t n, float *out) {
  int64_t ahead = std::max<int64_t>(AHEAD, K * n * sizeof(W)); // behind these K rows
  constexpr int64_t LINE = 64 / sizeof(W); // of the cache
  Lanes sums[K * N] = {};
  auto add = [&](int k, int64_t i) {
    Lanes weights = load(w + k * n + i);
#pragma GCC unroll 8
    for (int b = 0; b < N; b++)
      sums[k * N + b] += weights * load(x + b * n + i);
  };
  int64_t i = 0;
  for (; i + LINE <= n; i += LINE)
#pragma GCC unroll 16
    for (int k = 0; k < K; k++) {
      look_ahead(w + k * n + i, ahead);
#pragma GCC unroll 4
      for (int j = 0; j < LINE; j += LANES)
        add(k, i + j);
    }
  for (; i + LANES <= n; i += LANES)
#pragma GCC unroll 16
    for (int k = 0; k < K; k++)
      add(k, i);
  totals<K * N>(sums, out);
  for (; i < n; i++)
    for (int j = 0; j < K * N; j++)
      out[j] += widen(w[j / N * n + i]) * x[j % N * n + i];
}

// n things in pieces of a size that the compiler knows, which is SIZE, then half of it, down to 1:
// each(size, the first one's number).
template <int SIZE, class Each> void in_pieces(int64_t n, Each each, int64_t first = 0) {
  for (; n - first >= SIZE; first += SIZE)
    each(std::integral_constant<int, SIZE>(), first);
  if constexpr (SIZE > 1)
    in_pieces<SIZE / 2>(n, each, first);
}

// give(k, b, the dot product of row k of w, (count, n), and row b of x, (rows, n)). Several rows of w
// at a time, with up to eight of x; what is read of w for these is at hand for further ones.
template <class W, class Give>
void all_dots(const W *w, int64_t count, const float *x, int64_t rows, int64_t n, Give give) {
  for (int64_t begin = 0; begin < count; begin += NEAR)
    in_pieces<8>(rows, [&](auto size, int64_t first) {
      constexpr int N = size(), K = N == 1 ? 2 : LANES / N; // at most GRAIN: 16 are slower to read
      float out[LANES];
      int64_t k = begin, end = std::min(begin + NEAR, count);
      for (; k + K <= end; k += K) {
        dots<K, N>(w + k * n, x + first * n, n, out);
        for (int j = 0; j < K * N; j++)
          give(k + j / N, first + j % N, out[j]);
      }
      for (; k < end; k++) {
        dots<1, N>(w + k * n, x + first * n, n, out);
        for (int b = 0; b < N; b++)
          give(k, first + b, out[b]);
      }
    });
}

// Of `size` things, those of one thread; it begins at a multiple of `grain`, so that which of them are
// computed together, and with it the rounding, does not depend on the number of threads.
struct Part {
  int64_t begin, end;
  Part(int64_t size, int64_t grain) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    begin = size * thread / threads / grain * grain;
    end = thread + 1 == threads ? size : size * (thread + 1) / threads / grain * grain;
  }
};

// This thread's outputs of matrix times x, (rows, inputs): give(row, output, value).
template <class T, class W, class Give>
void product(Matrix m, const float *x, int64_t rows, int64_t inputs, int64_t outputs, Give give) {
  auto scale = (const T *)m.scale;
  Part part(outputs, GRAIN);
  auto w = (const W *)m.weight + part.begin * inputs;
  all_dots(w, part.end - part.begin, x, rows, inputs, [&](int64_t k, int64_t row, float value) {
    int64_t output = part.begin + k;
    give(row, output, value * (scale ? widen(scale[output]) : 1));
  });
}

// ---------------------------------------------------------------------------- the modules

// x / rms(x) * weight, n of each; in place where x is out
template <class T> void norm(const float *x, const T *weight, int64_t n, float eps, float *out) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; i++)
    squares += x[i] * x[i];
  float factor = 1 / std::sqrt(squares / n + eps);
  for (int64_t i = 0; i < n; i++)
    out[i] = as<T>(x[i] * factor * widen(weight[i]));
}

// silu(gate) * up, n of each, in the place of gate
template <class T> void gated(T *gate, const T *up, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) {
    int64_t count = std::min<int64_t>(LANES, n - i);
    float z[LANES] = {};
    for (int64_t k = 0; k < count; k++)
      z[k] = widen(gate[i + k]);
    store(load(z) / (1 + exponential(-load(z))), z);
    for (int64_t k = 0; k < count; k++)
      narrow(as<T>(z[k]) * widen(up[i + k]), gate[i + k]);
  }
}

// softmax of n scores, in place; there is room for zeros behind them, up to whole Lanes
inline void softmax(float *scores, int64_t n) {
  std::fill(scores + n, scores + (n + LANES - 1) / LANES * LANES, -INFINITY);
  Lanes highest = load(scores);
  for (int64_t i = LANES; i < n; i += LANES)
    highest = load(scores + i) > highest ? load(scores + i) : highest;
  float most = highest[0];
  for (int lane = 1; lane < LANES; lane++)
    most = std::max(most, highest[lane]);
  Lanes sums = {};
  for (int64_t i = 0; i < n; i += LANES) {
    Lanes powers = exponential(load(scores + i) - most);
    sums += powers;
    store(powers, scores + i);
  }
  float sum = total(sums);
  for (int64_t i = 0; i < n; i++)
    scores[i] /= sum;
}

// sums[b] += the sum of weights[b * width + at] times row `at` of x, (count, n), for B sums, (B, n)
template <int B, class T>
void mix(const T *x, int64_t count, int64_t n, const float *weights, int64_t width, float *sums) {
  in_pieces<LANES / B>(n / LANES, [&](auto size, int64_t lanes) {
    constexpr int N = size();
    float *to = sums + lanes * LANES;
    Lanes kept[B][N];
    for (int b = 0; b < B; b++)
      for (int j = 0; j < N; j++)
        kept[b][j] = load(to + b * n + j * LANES);
    for (int64_t at = 0; at < count; at++) {
      const T *row = x + at * n + lanes * LANES;
      for (int byte = 0; byte < N * LANES * int(sizeof(T)); byte += 64)
        look_ahead(row, AHEAD + byte);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) {
        Lanes value = load(row + j * LANES);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
          kept[b][j] += weights[b * width + at] * value;
      }
    }
    for (int b = 0; b < B; b++)
      for (int j = 0; j < N; j++)
        store(kept[b][j], to + b * n + j * LANES);
  });
  for (int64_t i = n / LANES * LANES; i < n; i++)
    for (int64_t at = 0; at < count; at++)
      for (int b = 0; b < B; b++)
        sums[b * n + i] += weights[b * width + at] * widen(x[at * n + i]);
}

// RoPE: pair i with i + n / 2 (rope.py)
template <class T> void rotate(float *x, const float *cos, const float *sin, int64_t n) {
  for (int64_t i = 0, j = n / 2; j < n; i++, j++) {
    float first = x[i], second = x[j];
    x[i] = as<T>(first * cos[i] - second * sin[i]);
    x[j] = as<T>(second * cos[i] + first * sin[i]);
  }
}

// A key/value head of a row: its new key and value go to the cache, and the query heads that read it
// (model.py: attend) look at all that is real. q and out hold those heads, (group, head_dim).
template <class T>
void attend(const Step &s, const Layer &layer, int64_t row, int64_t kv_head, const T *q, const T *k,
            const T *v, std::vector<float> &scratch, T *out) {
  int64_t D = s.head_dim, group = s.heads / s.kv_heads, keys = s.slot + 1;
  auto past_keys = (T *)layer.keys + (row * s.kv_heads + kv_head) * s.capacity * D;
  auto past_values = (T *)layer.values + (row * s.kv_heads + kv_head) * s.capacity * D;
  const bool *real = s.real + row * s.capacity;
  const float *cos = s.cos + s.positions[row] * (D / 2), *sin = s.sin + s.positions[row] * (D / 2);

  int64_t width = (keys + LANES - 1) / LANES * LANES;
  float *key = aligned(scratch, (1 + 2 * group) * D + group * width);
  float *queries = key + D, *sums = queries + group * D;
  float *weights = sums + group * D; // (group, width)
  for (int64_t i = 0; i < D; i++)
    key[i] = widen(k[i]);
  norm(key, (const T *)layer.k_norm, D, s.eps, key);
  rotate<T>(key, cos, sin, D);
  for (int64_t i = 0; i < D; i++)
    narrow(key[i], past_keys[s.slot * D + i]);
  std::memcpy(past_values + s.slot * D, v, D * sizeof(T));
  for (int64_t g = 0; g < group; g++) {
    float *query = queries + g * D;
    for (int64_t i = 0; i < D; i++)
      query[i] = widen(q[g * D + i]);
    norm(query, (const T *)layer.q_norm, D, s.eps, query);
    rotate<T>(query, cos, sin, D);
  }

  // The scores, then softmax, then the values. What is read serves all queries.
  all_dots(past_keys, keys, queries, group, D,
           [&](int64_t at, int64_t g, float value) { weights[g * width + at] = value; });
  float scale = 1 / std::sqrt(float(D));
  for (int64_t g = 0; g < group; g++) {
    for (int64_t at = 0; at < keys; at++)
      weights[g * width + at] = real[at] ? weights[g * width + at] * scale : -INFINITY;
    softmax(weights + g * width, keys);
  }
  std::fill(sums, sums + group * D, 0);
  for (int64_t at = 0; at < keys; at += NEAR)
    in_pieces<8>(group, [&](auto size, int64_t g) {
      mix<size()>(past_values + at * D, std::min(NEAR, keys - at), D, weights + g * width + at, width,
                  sums + g * D);
    });
  for (int64_t i = 0; i < group * D; i++)
    narrow(sums[i], out[i]);
}

// ------------------------------------------------------------------------------- the step

template <class T, class W> void step(const Step &s) {
  int64_t B = s.rows, C = s.hidden, D = s.head_dim, H = s.heads, K = s.kv_heads, I = s.intermediate;
  std::vector<T> x(B * C), q(B * H * D), k(B * K * D), v(B * K * D), heads(B * H * D);
  std::vector<T> gate(B * I), up(B * I);
  for (int64_t b = 0; b < B; b++)
    std::memcpy(&x[b * C], (const T *)s.embedding + s.ids[b] * C, C * sizeof(T));

#pragma omp parallel num_threads(s.threads)
  {
    std::vector<float> room, scratch;
    float *in = nullptr; // what this thread's products take, (rows, inputs)
    auto take = [&](const std::vector<T> &from) {
      in = aligned(room, from.size());
      for (size_t i = 0; i < from.size(); i++)
        in[i] = widen(from[i]);
    };
    auto take_normed = [&](const void *weight) { // each thread for itself: faster than to wait
      take(x);
      for (int64_t b = 0; b < B; b++)
        norm(&in[b * C], (const T *)weight, C, s.eps, &in[b * C]);
    };
    auto into = [](std::vector<T> &to, int64_t outputs) {
      return [&to, outputs](int64_t row, int64_t i, float y) { narrow(y, to[row * outputs + i]); };
    };
    auto add = [&](int64_t row, int64_t i, float y) { // to the stream
      narrow(widen(x[row * C + i]) + as<T>(y), x[row * C + i]);
    };

    for (int64_t l = 0; l < s.layers; l++) {
      const Layer &layer = s.layer[l];
      take_normed(layer.input_norm);
      product<T, W>(layer.q, in, B, C, H * D, into(q, H * D));
      product<T, W>(layer.k, in, B, C, K * D, into(k, K * D));
      product<T, W>(layer.v, in, B, C, K * D, into(v, K * D));
#pragma omp barrier
      Part part(B * K, 1);
      for (int64_t i = part.begin; i < part.end; i++) {
        int64_t at = i * (H / K) * D; // of its query heads
        attend(s, layer, i / K, i % K, &q[at], &k[i * D], &v[i * D], scratch, &heads[at]);
      }
#pragma omp barrier
      take(heads);
      product<T, W>(layer.o, in, B, H * D, C, add);
#pragma omp barrier
      take_normed(layer.post_norm);
      product<T, W>(layer.gate, in, B, C, I, into(gate, I));
      product<T, W>(layer.up, in, B, C, I, into(up, I));
      Part mine(I, GRAIN);
      for (int64_t b = 0; b < B; b++)
        gated(&gate[b * I + mine.begin], &up[b * I + mine.begin], mine.end - mine.begin);
#pragma omp barrier
      take(gate);
      product<T, W>(layer.down, in, B, I, C, add);
#pragma omp barrier
    }
    take_normed(s.norm);
    auto logits = (T *)s.logits;
    product<T, W>(s.head, in, B, C, s.vocab,
                  [&](int64_t row, int64_t i, float y) { narrow(y, logits[row * s.vocab + i]); });
  }
}

extern "C" void decode_step(const Step *s) {
  bool int8 = s->head.scale != nullptr;
  if (s->bf16)
    int8 ? step<BFloat16, int8_t>(*s) : step<BFloat16, BFloat16>(*s);
  else
    int8 ? step<float, int8_t>(*s) : step<float, float>(*s);
}
