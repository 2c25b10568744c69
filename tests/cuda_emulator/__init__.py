"""A CUDA emulator for tests: generated source, compiled with g++, one fiber per GPU thread.

``translate`` turns CUDA source (optifx_tvm.cuda_source) into C++ whose memory accesses are checked
(device.h), ``scheduler.cpp`` runs the threads of a block between barriers in a chosen order,
``emulator`` puts these together.

Found without a GPU: wrong numbers of the whole thread mapping, reads of shared memory nobody has
written (it is poisoned with NaN), accesses out of bounds or misaligned, data races in shared
memory, barrier divergence. Not found: races in global memory, missing waits for asynchronous
copies.
"""
