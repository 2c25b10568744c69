// What translated kernels (translate.py) see instead of CUDA: built-in variables, vector types,
// fp16, intrinsics, and checked access to global, shared and local memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __align__(n) alignas(n)

using uint = unsigned int;
using uchar = unsigned char;
using ushort = unsigned short;
using half = _Float16;
using __half = half;

struct dim3 { uint x, y, z; };
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

#define VECTOR(name, type, bytes)                                                             \
  struct alignas(4 * bytes) name##4 { type x, y, z, w; };                                     \
  struct alignas(2 * bytes) name##2 { type x, y; };                                           \
  struct name##1 { type x; };                                                                 \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }      \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }
VECTOR(float, float, 4)
VECTOR(int, int, 4)
VECTOR(uint, uint, 4)
VECTOR(half, half, 2)
#undef VECTOR

inline float __half2float(half x) { return (float)x; }
inline half __float2half(float x) { return (half)x; }
inline half __float2half_rn(float x) { return (half)x; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline uint __pack_half2(half x, half y) {
  ushort a, b;
  std::memcpy(&a, &x, 2);
  std::memcpy(&b, &y, 2);
  return ((uint)b << 16) | a;
}

// Overloads, not a template: an element of a checked array converts to its type.
#define MIN_MAX(type)                                                                         \
  inline type max(type a, type b) { return a > b || b != b ? a : b; }                         \
  inline type min(type a, type b) { return a < b || b != b ? a : b; }
MIN_MAX(float)
MIN_MAX(double)
MIN_MAX(half)
MIN_MAX(int)
MIN_MAX(uint)
MIN_MAX(long)
#undef MIN_MAX
inline half __hmax(half a, half b) { return max(a, b); }
inline half __hmin(half a, half b) { return min(a, b); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline half hexp(half x) { return (half)std::exp((float)x); }
inline half hlog(half x) { return (half)std::log((float)x); }
inline half hsqrt(half x) { return (half)std::sqrt((float)x); }
inline half hrsqrt(half x) { return (half)(1.0f / std::sqrt((float)x)); }
inline half htanh(half x) { return (half)std::tanh((float)x); }
inline half __habs(half x) { return x < 0 ? -x : x; }

namespace emu {

/// When a cell of shared memory was accessed and by whom (thread + 1, 0 for nobody).
struct Access {
  unsigned block_epoch, warp_epoch, thread;
};
struct Cell {
  Access write, read;
};

/// One allocation.
struct Memory {
  const char* name;
  char* base;
  long bytes;
  Cell* cells;  // shared memory only: one for every 2 bytes
};

/// Stops the launch; the text becomes the error message.
[[noreturn]] void fault(const char* what, const Memory& memory, long offset, long bytes);
/// Waits for all threads of the block; `line` names the barrier.
void block_barrier(int line);
/// Waits for all threads of the warp.
void warp_barrier();
/// Notes an access to shared memory and stops the launch if it is a race.
void note_shared(const Memory& memory, const char* at, long bytes, bool write);
/// The dynamic shared memory of the block.
Memory& dynamic_shared();
/// Static shared memory number `index` (below 64) of the block.
Memory& static_shared(int index, const char* name, long bytes);
/// Deposits `operand` of this lane, waits for the warp, returns all lanes' operands. Call
/// warp_barrier() when done with them.
void** exchange(void* operand);

inline void check(const Memory& memory, const char* at, long bytes, long alignment) {
  long offset = at - memory.base;
  if (__builtin_expect(offset < 0 || offset + bytes > memory.bytes, 0))
    fault("out of bounds", memory, offset, bytes);
  if (__builtin_expect((uintptr_t)at % alignment != 0, 0))
    fault("misaligned", memory, offset, bytes);
}

/// What `pointer[i]` and `*(type*)pointer` are: tells reading from writing.
template <class T> struct Pointer;
template <class T> struct Element {
  T* at;
  const Memory* memory;
  operator T() const {
    if (memory->cells) note_shared(*memory, (const char*)at, sizeof(T), false);
    return *at;
  }
  const Element& operator=(T value) const {
    if (memory->cells) note_shared(*memory, (const char*)at, sizeof(T), true);
    *at = value;
    return *this;
  }
  const Element& operator=(const Element& other) const { return *this = (T)other; }
  Pointer<T> operator&() const { return {(char*)at, memory}; }
};

/// A pointer that knows its allocation.
template <class T> struct Pointer {
  char* at;
  const Memory* memory;
  template <class I> Pointer operator+(I count) const {
    return {at + (long)count * (long)sizeof(T), memory};
  }
  template <class I> Element<T> operator[](I index) const {
    return (*this + index).template element<T>();
  }
  template <class U> Element<U> element() const {
    check(*memory, at, sizeof(U), alignof(U));
    return {(U*)at, memory};
  }
};

template <class T> Pointer<T> pointer(const Memory& memory) { return {memory.base, &memory}; }
template <class U, class T> Pointer<U> view(Pointer<T> p) { return {p.at, p.memory}; }
template <class U, class T> U* view(T* p) { return (U*)p; }
template <class U, class T> Element<U> at(Pointer<T> p) { return p.template element<U>(); }
template <class U, class T> U& at(T* p) { return *(U*)p; }

/// An array in registers or local memory, poisoned with NaN.
template <class T, long N> struct Local {
  alignas(64) char data[N * sizeof(T)];
  Memory memory;
  explicit Local(const char* name) : memory{name, data, N * (long)sizeof(T), nullptr} {
    std::memset(data, 0xff, sizeof data);
  }
  Local(const Local&) = delete;
  operator Pointer<T>() const { return pointer<T>(memory); }
  template <class I> Pointer<T> operator+(I count) const { return pointer<T>(memory) + count; }
  template <class I> Element<T> operator[](I index) const { return pointer<T>(memory)[index]; }
};
template <class U, class T, long N> Pointer<U> view(const Local<T, N>& a) {
  return pointer<U>(a.memory);
}
template <class U, class T, long N> Element<U> at(const Local<T, N>& a) {
  return pointer<U>(a.memory).template element<U>();
}

/// Warp shuffle: the value of another lane.
template <class T> T shuffle(T value, uint lane) {
  void** all = exchange(&value);
  T found = *(T*)all[lane % 32];
  warp_barrier();
  return found;
}

template <class T> T shuffle(const Element<T>& value, uint lane) { return shuffle((T)value, lane); }

}  // namespace emu

#define __syncthreads() emu::block_barrier(__LINE__)
#define __syncwarp(...) emu::warp_barrier()
#define __shfl_sync(mask, value, lane, ...) emu::shuffle(value, lane)
#define __shfl_xor_sync(mask, value, bits, ...) emu::shuffle(value, (threadIdx.x & 31) ^ (bits))
#define __shfl_down_sync(mask, value, delta, ...) \
  emu::shuffle(value, ((threadIdx.x & 31) + (delta)) < 32 ? (threadIdx.x & 31) + (delta) : (threadIdx.x & 31))
#define __activemask() 0xffffffffu
