// Warp-wide and asynchronous PTX instructions, under the names that inline_asm.py derives from
// their mnemonics. Outputs first, then inputs, as in the asm statement.
#pragma once
#include "device.h"

namespace emu {

/// cp.async: the bytes arrive when they are waited for, not before.
void copy_async(char* to, const char* from, long bytes);
void commit_copies();
void wait_copies(int groups_left);

inline uint lane_index() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

/// Address in the shared window; only dynamic shared memory has one here.
template <class T> uint shared_address(Pointer<T> p) {
  if (p.memory != &dynamic_shared()) fault("not dynamic shared memory", *p.memory, 0, 0);
  return (uint)(p.at - p.memory->base);
}

template <long BYTES, long TO, long FROM, class T, class S>
void copy_async_call(Pointer<T> to, long to_offset, Pointer<S> from, long from_offset,
                     bool wanted = true) {
  char* target = to.at + to_offset * TO;
  const char* source = from.at + from_offset * FROM;
  check(*to.memory, target, BYTES, BYTES);
  note_shared(*to.memory, target, BYTES, true);
  if (wanted) check(*from.memory, source, BYTES, BYTES);
  copy_async(target, wanted ? source : nullptr, BYTES);
}

inline half half_of(uint pair, int index) {
  ushort bits = index ? pair >> 16 : pair & 0xffff;
  half value;
  std::memcpy(&value, &bits, 2);
  return value;
}

/// A hint: nothing to do, but the address is evaluated.
template <class T> void prefetch(T&&) {}

/// D = A * B + C of one warp: A 16 x K, B K x 8, both f16. REGS registers of A, REGS / 2 of B.
template <int K> void multiply_accumulate(const uint* a, const uint* b, float* c) {
  struct Operands {
    uint a[4], b[2];
  } mine;
  std::memcpy(mine.a, a, K / 4 * sizeof(uint));
  std::memcpy(mine.b, b, K / 8 * sizeof(uint));
  void** all = exchange(&mine);
  uint group = lane_index() / 4, pair = lane_index() % 4;
  for (int i = 0; i < 4; i++) {
    uint row = group + (i >= 2 ? 8 : 0), column = pair * 2 + i % 2;
    for (uint k = 0; k < K; k++) {
      const Operands& of_a = *(Operands*)all[row % 8 * 4 + k % 8 / 2];
      const Operands& of_b = *(Operands*)all[column * 4 + k % 8 / 2];
      float left = (float)half_of(of_a.a[row / 8 + k / 8 * 2], k % 2);
      c[i] += left * (float)half_of(of_b.b[k / 8], k % 2);
    }
  }
  warp_barrier();
}

template <class D>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(D&& d0, D&& d1, D&& d2, D&& d3, uint a0,
                                                       uint a1, uint a2, uint a3, uint b0, uint b1,
                                                       float c0, float c1, float c2, float c3) {
  uint a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  float c[] = {c0, c1, c2, c3};
  multiply_accumulate<16>(a, b, c);
  d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
}

template <class D>
void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(D&& d0, D&& d1, D&& d2, D&& d3, uint a0,
                                                      uint a1, uint b0, float c0, float c1,
                                                      float c2, float c3) {
  uint a[] = {a0, a1}, b[] = {b0};
  float c[] = {c0, c1, c2, c3};
  multiply_accumulate<8>(a, b, c);
  d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
}

/// Matrix number `index`: lane 8 * index + i gives the address of its row i.
inline uint matrix_pair(void** all, int index, bool transposed) {
  uint row = lane_index() / 4, column = lane_index() % 4 * 2;
  ushort found[2];
  for (uint i = 0; i < 2; i++) {
    uint y = transposed ? column + i : row, x = transposed ? row : column + i;
    std::memcpy(&found[i], *(char**)all[index * 8 + y] + 2 * x, 2);
  }
  return (uint)found[1] << 16 | found[0];
}

inline void load_matrices(uint* found, int count, bool transposed, uint address) {
  Memory& memory = dynamic_shared();
  char* row = memory.base + address;
  if ((int)lane_index() < 8 * count) {
    check(memory, row, 16, 16);
    note_shared(memory, row, 16, false);
  }
  void** all = exchange(&row);
  for (int i = 0; i < count; i++) found[i] = matrix_pair(all, i, transposed);
  warp_barrier();
}

#define LDMATRIX(suffix, transposed)                                                          \
  template <class D> void ldmatrix_sync_aligned_m8n8_x1##suffix(D&& d0, uint address) {       \
    uint found[1];                                                                            \
    load_matrices(found, 1, transposed, address);                                             \
    d0 = found[0];                                                                            \
  }                                                                                           \
  template <class D> void ldmatrix_sync_aligned_m8n8_x2##suffix(D&& d0, D&& d1, uint address) { \
    uint found[2];                                                                            \
    load_matrices(found, 2, transposed, address);                                             \
    d0 = found[0], d1 = found[1];                                                             \
  }                                                                                           \
  template <class D>                                                                          \
  void ldmatrix_sync_aligned_m8n8_x4##suffix(D&& d0, D&& d1, D&& d2, D&& d3, uint address) {  \
    uint found[4];                                                                            \
    load_matrices(found, 4, transposed, address);                                             \
    d0 = found[0], d1 = found[1], d2 = found[2], d3 = found[3];                               \
  }
LDMATRIX(_shared_b16, false)
LDMATRIX(_trans_shared_b16, true)
#undef LDMATRIX

}  // namespace emu

#define __cvta_generic_to_shared(pointer) emu::shared_address(pointer)
