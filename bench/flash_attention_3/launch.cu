// FlashAttention-3's forward and backward by two C functions: what `hopper/flash_api.cpp` of its repository fills in before it launches, for bf16 tensors
// (B, S, H, D) with a last stride of 1, D 64 or 128, as many heads of keys as of queries or fewer, no window, no soft-cap.
// Strides are in elements; `strides` has (batch, row, head) of q, k, v, o and, backward, of dO, dQ, dK, dV.
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "flash.h"

struct Sizes {
    int batch, queries, keys, heads, key_heads, dim, causal, multiprocessors, rounded_queries, rounded_keys;
    float scale;
};

static void set_common(Flash_fwd_params &p, Sizes const &n, void *const *tensors, int64_t const *strides, float *log_sum_exp) {
    p.q_ptr = tensors[0], p.k_ptr = tensors[1], p.v_ptr = tensors[2], p.o_ptr = tensors[3];
    p.q_batch_stride = strides[0], p.q_row_stride = strides[1], p.q_head_stride = strides[2];
    p.k_batch_stride = strides[3], p.k_row_stride = strides[4], p.k_head_stride = strides[5];
    p.v_batch_stride = strides[6], p.v_row_stride = strides[7], p.v_head_stride = strides[8], p.v_dim_stride = 1;
    p.o_batch_stride = strides[9], p.o_row_stride = strides[10], p.o_head_stride = strides[11];
    p.softmax_lse_ptr = log_sum_exp;
    p.b = p.b_k = n.batch, p.h = n.heads, p.h_k = n.key_heads;
    p.seqlen_q = n.queries, p.seqlen_k = n.keys, p.seqlen_q_rounded = n.rounded_queries, p.seqlen_k_rounded = n.rounded_keys;
    p.total_q = n.batch * n.queries, p.total_k = n.batch * n.keys;
    p.d = p.d_rounded = p.dv = p.dv_rounded = n.dim;
    p.scale_softmax = n.scale;
    p.p_dropout = p.rp_dropout = 1.f, p.p_dropout_in_uint8_t = 255;
    p.is_bf16 = true, p.is_causal = n.causal;
    p.window_size_left = n.keys - 1, p.window_size_right = n.causal ? 0 : n.queries - 1;
    p.num_splits = 1, p.page_size = 1;
    p.arch = 90, p.num_sm = n.multiprocessors;
}

// `drawn`: one int of device memory; blocks draw their tasks from it under a causal mask. Returns a cudaError_t.
extern "C" int forward(Sizes const *n, void *const *tensors, int64_t const *strides, float *log_sum_exp, int *drawn, cudaStream_t stream) {
    Flash_fwd_params p = {};
    set_common(p, *n, tensors, strides, log_sum_exp);
    if (n->causal) {
        p.tile_count_semaphore = drawn;
        cudaMemsetAsync(drawn, 0, sizeof(int), stream);
    }
    auto run = n->dim == 64 ? run_mha_fwd_<90, cutlass::bfloat16_t, 64, 64, false, false, false, false>
                            : run_mha_fwd_<90, cutlass::bfloat16_t, 128, 128, false, false, false, false>;
    run(p, stream);
    return cudaGetLastError();
}

// `buffers`: log-sum-exp, then fp32 memory for the row sums of O·dO and for log-sum-exp in base 2 (B × H × rounded queries each), for dQ (B × H × rounded queries
// × D), for dK and dV (B × key heads × rounded keys × D, zeros; null where each head has keys of its own), and ints (B × H × S / 64, rounded up).
extern "C" int backward(Sizes const *n, void *const *tensors, int64_t const *strides, void *const *buffers, cudaStream_t stream) {
    Flash_bwd_params p = {};
    set_common(p, *n, tensors, strides, static_cast<float *>(buffers[0]));
    p.do_ptr = tensors[4], p.dq_ptr = tensors[5], p.dk_ptr = tensors[6], p.dv_ptr = tensors[7];
    p.do_batch_stride = strides[12], p.do_row_stride = strides[13], p.do_head_stride = strides[14];
    p.dq_batch_stride = strides[15], p.dq_row_stride = strides[16], p.dq_head_stride = strides[17];
    p.dk_batch_stride = strides[18], p.dk_row_stride = strides[19], p.dk_head_stride = strides[20];
    p.dv_batch_stride = strides[21], p.dv_row_stride = strides[22], p.dv_head_stride = strides[23];
    p.dsoftmax_sum = buffers[1], p.softmax_lse_log2_ptr = buffers[2], p.dq_accum_ptr = buffers[3];
    p.dk_accum_ptr = buffers[4], p.dv_accum_ptr = buffers[5], p.dq_semaphore = static_cast<int *>(buffers[6]);
    auto run = n->dim == 64 ? run_mha_bwd_<90, cutlass::bfloat16_t, 64, false> : run_mha_bwd_<90, cutlass::bfloat16_t, 128, false>;
    run(p, stream);
    return cudaGetLastError();
}
