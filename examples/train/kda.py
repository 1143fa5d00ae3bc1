#!/usr/bin/env python3
"""A KDA / full-attention hybrid in plain PyTorch, forward and backward, for training small models.

    python3 examples/train/kda.py --check      # chunked form against the recurrence, in float64

Shapes: B sequences, T tokens, H heads, K key channels and V value channels of a head, C tokens of a
chunk, N = T / C chunks, P = B H. Everything is float32 unless its inputs are not.

KDA, per head, with the state S [K, V] zero at first, decay g <= 0 [K], beta in (0, 1):

    S_t = diag(exp g_t) S_{t-1}
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T
    o_t = S_t^T q_t

The chunked form. With G_i the sum of g from the chunk's first token to token i, S the state before
the chunk, and d_i = beta_i (v_i - ...) the vector that token i adds along k_i:

    L_ij  = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)   j < i
    d     = (I + L)^-1 (beta v - (beta k exp G) S) = u - w S
    o_i   = (q_i exp G_i) S + sum_{j <= i} (sum_c q_ic k_jc exp(G_ic - G_jc)) d_j
    S'    = diag(exp G_C) S + sum_j (k_j exp(G_C - G_j)) d_j^T = M S + b

u, w, M and b of all chunks are computed at once; only S' = M S + b runs from chunk to chunk. No
exponent is positive, so that strong decay underflows to 0 and nothing overflows.

Parameters have the names of the published layout (Kimi-Linear; Attention Residuals as Kimi K3's).
"""
import argparse
import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

L2_EPS = 1e-6
LATENT_NORM_EPS = 1e-6  # of MLA's inner norm, whatever rms_norm_eps is

# ---- The operator ----


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L [..., C, C], C a power of two.

    Inverses of diagonal blocks of size s give those of size 2 s: the corner between them is
    -T L T. The gradient is that of any inverse.
    """

    @staticmethod
    def forward(ctx, lower):
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        s = 1
        while s < size:
            block = index // s
            corner = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
            part = lower * corner.to(lower.dtype)
            inverse = inverse - part if s == 1 else inverse - inverse @ part @ inverse
            s *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):
        inverse, = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradient @ transposed)


class ChunkScan(torch.autograd.Function):
    """S_0 = 0, S_{n+1} = M_n S_n + b_n: one product a chunk, forward and backward.

    M [N, P, K, K], b [N, P, K, V]; gives S_0 .. S_{N-1}, the state before each chunk.
    """

    @staticmethod
    def forward(ctx, m, b):
        states = torch.empty_like(b)
        states[0].zero_()
        for n in range(m.shape[0] - 1):
            torch.baddbmm(b[n], m[n], states[n], out=states[n + 1])
        ctx.save_for_backward(m, states)
        return states

    @staticmethod
    def backward(ctx, gradient):
        m, states = ctx.saved_tensors
        gradient = gradient.contiguous()
        total = torch.empty_like(gradient)  # gradient of S_n, through all later chunks
        total[-1].copy_(gradient[-1])
        for n in range(m.shape[0] - 2, -1, -1):
            torch.baddbmm(gradient[n], m[n].transpose(-1, -2), total[n + 1], out=total[n])
        db, dm = torch.zeros_like(gradient), torch.zeros_like(m)
        db[:-1] = total[1:]
        dm[:-1] = total[1:] @ states[:-1].transpose(-1, -2)
        return dm, db


class PairScores(torch.autograd.Function):
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, else 0, of x = q and x = k; each [..., C, C].

    Keeps q, k and G only, and forms the pairs [..., C, C, K] again for the gradient.
    """

    @staticmethod
    def decayed_keys(k, G):
        later = torch.ones(k.shape[-2], k.shape[-2], device=k.device, dtype=torch.bool).triu(1)
        decay = G.unsqueeze(-2) - G.unsqueeze(-3)
        decay = decay.masked_fill_(later.unsqueeze(-1), -1e30).exp_()
        return decay, decay * k.unsqueeze(-3)

    @staticmethod
    def forward(ctx, q, k, G):
        ctx.save_for_backward(q, k, G)
        keys = PairScores.decayed_keys(k, G)[1]
        both = torch.stack([q, k], -2) @ keys.transpose(-1, -2)  # [..., i, 2, j]
        return both[..., 0, :].contiguous(), both[..., 1, :].contiguous()

    @staticmethod
    def backward(ctx, from_q, from_k):
        q, k, G = ctx.saved_tensors
        decay, keys = PairScores.decayed_keys(k, G)
        gradient = torch.stack([from_q, from_k], -2)
        rows = gradient @ keys
        dq, dk_row = rows[..., 0, :], rows[..., 1, :]
        pairs = gradient.transpose(-1, -2) @ torch.stack([q, k], -2)  # [..., i, j, K]
        dk_col = pairs.mul_(decay).sum(-3)
        return dq, dk_row + dk_col, q * dq + k * (dk_row - dk_col)


def pair_scores_fusible(q, k, G):
    """PairScores element by element: a compiler fuses it, and stores nothing of [C, C, K]."""
    index = torch.arange(k.shape[-2], device=k.device)
    seen = (index[:, None] >= index[None, :]).unsqueeze(-1)
    never = torch.full((), -1e30, device=G.device, dtype=G.dtype)
    keys = torch.where(seen, G.unsqueeze(-2) - G.unsqueeze(-3), never).exp() * k.unsqueeze(-3)
    return (q.unsqueeze(-2) * keys).sum(-1), (k.unsqueeze(-2) * keys).sum(-1)


def to_chunks(x, chunk):
    """[B, T, H, X] to [N, B H, C, X]."""
    B, T, H, X = x.shape
    x = x.reshape(B, T // chunk, chunk, H, X).permute(1, 0, 3, 2, 4)
    return x.reshape(T // chunk, B * H, chunk, X)


def chunk_parts(q, k, v, g, beta, chunk, fusible):
    """What each chunk needs, for all chunks at once: M, b, w, u, q exp(G), scores of q."""
    q, k, v, g = (to_chunks(x, chunk) for x in (q, k, v, g))
    beta = to_chunks(beta.unsqueeze(-1), chunk)
    G = g.cumsum(-2)
    q_scores, k_scores = (pair_scores_fusible if fusible else PairScores.apply)(q, k, G)
    inverse = UnitLowerInverse.apply((k_scores * beta).tril(-1))
    decay = G.exp()
    w = inverse @ (beta * k * decay)
    u = inverse @ (beta * v)
    last = G[..., -1:, :]
    keys = (k * (last - G).exp()).transpose(-1, -2)
    m = torch.diag_embed(last.squeeze(-2).exp()) - keys @ w
    return m, keys @ u, w, u, q * decay, q_scores


def chunk_outputs(states, w, u, q, q_scores, B, T, H):
    """[B, T, H, V] from the states before the chunks."""
    o = q @ states + q_scores @ (u - w @ states)
    N, _, C, V = o.shape
    return o.reshape(N, B, H, C, V).permute(1, 0, 3, 2, 4).reshape(B, T, H, V)


def chunk_kda(q, k, v, g, beta, chunk=16, fusible=False):
    """q (scaled), k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H] to o [B, T, H, V]."""
    B, T, H, _ = q.shape
    m, b, w, u, q, q_scores = chunk_parts(q, k, v, g, beta, chunk, fusible)
    return chunk_outputs(ChunkScan.apply(m, b), w, u, q, q_scores, B, T, H)


def recurrent_kda(q, k, v, g, beta):
    """The same by definition, one token at a time."""
    B, T, H, K = q.shape
    S, out = q.new_zeros(B, H, K, v.shape[-1]), []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t].unsqueeze(-1) * k[:, t], error)
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(out, 1)


# ---- Layers as functions of tensors, so that layers of one shape share compiled code ----


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def l2_norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def short_conv(x, weight):
    """SiLU of a causal convolution over time, channel by channel. weight [channels, width]: the
    last tap is the present token's."""
    T, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = padded[:, :T] * weight[:, 0]
    for i in range(1, width):
        y = y + padded[:, i:T + i] * weight[:, i]
    return F.silu(y)


def kda_inputs(x, norm, w_in, conv, f_b, A_log, dt_bias, H, K, eps):
    """From the residual stream to the operator's inputs and the output gate."""
    B, T, _ = x.shape
    rows = F.linear(rms_norm(x, norm, eps), w_in)
    qkv, f, beta, gate = rows.split([3 * H * K, K, H, H * K], -1)
    q, k, v = (part.reshape(B, T, H, K) for part in short_conv(qkv, conv).split(H * K, -1))
    raw = (F.linear(f, f_b) + dt_bias).reshape(B, T, H, K)
    g = -A_log.exp()[:, None] * F.softplus(raw)
    return l2_norm(q) * K ** -0.5, l2_norm(k), v, g, torch.sigmoid(beta), gate


def kda_before(x, norm, w_in, conv, f_b, A_log, dt_bias, H, K, eps, chunk, fusible):
    q, k, v, g, beta, gate = kda_inputs(x, norm, w_in, conv, f_b, A_log, dt_bias, H, K, eps)
    return (*chunk_parts(q, k, v, g, beta, chunk, fusible), gate)


def kda_after(states, w, u, q, q_scores, gate, o_norm, w_out, B, T, H, K, eps):
    o = chunk_outputs(states, w, u, q, q_scores, B, T, H)
    y = rms_norm(o, o_norm, eps) * torch.sigmoid(gate.reshape(B, T, H, K))
    return F.linear(y.reshape(B, T, H * K), w_out)


def mla_before(x, norm, w_q, w_kv_a, kv_norm, w_kv_b, w_g, H, nope, rope, dim_v, latent, eps):
    """Queries, keys, values [B, H, T, ..] and the output gate. The shared key channels ("rope")
    are plain ones: nothing is rotated."""
    B, T, _ = x.shape
    x = rms_norm(x, norm, eps)
    q = F.linear(x, w_q).reshape(B, T, H, nope + rope)
    c, shared = F.linear(x, w_kv_a).split([latent, rope], -1)
    kv = F.linear(rms_norm(c, kv_norm, LATENT_NORM_EPS), w_kv_b).reshape(B, T, H, nope + dim_v)
    k, v = kv.split([nope, dim_v], -1)
    k = torch.cat([k, shared.unsqueeze(2).expand(B, T, H, rope)], -1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), F.linear(x, w_g)


def causal_attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    T = q.shape[-2]
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def mla_after(o, gate, w_out):
    B, H, T, dim_v = o.shape
    return F.linear(o.transpose(1, 2).reshape(B, T, H * dim_v) * torch.sigmoid(gate), w_out)


def feed_forward(x, norm, w_gate_up, w_down, eps):
    gate, up = F.linear(rms_norm(x, norm, eps), w_gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w_down)


def attention_residual(query, eps, *sources):
    """sum_j p_j v_j over the sources v_j [B, T, d], p = softmax over j of query . RMSNorm(v_j)."""
    scores = [(v * query).sum(-1) * torch.rsqrt(v.square().mean(-1) + eps) for v in sources]
    p = torch.stack(scores, -1).softmax(-1)
    mix = p[..., 0:1] * sources[0]
    for j in range(1, len(sources)):
        mix = mix + p[..., j:j + 1] * sources[j]
    return mix


COMPILED = {}  # function to its compiled form, for training; empty unless compile_layers was called


def compile_layers():
    """Compiles what surrounds the scan; evaluation stays eager."""
    import torch._dynamo as dynamo
    for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit",
                  "accumulated_cache_size_limit"):
        if hasattr(dynamo.config, limit):
            setattr(dynamo.config, limit, 256)
    for function in (kda_before, kda_after, mla_before, mla_after, feed_forward,
                     attention_residual):
        COMPILED[function] = torch.compile(function, dynamic=False)


def call(function, module, *arguments):
    chosen = COMPILED.get(function, function) if module.training else function
    return chosen(*arguments)


# ---- The model ----


class Config:
    """Sizes by the names of config.json, for layers that are all dense.

    layers: a letter each, k for KDA, f for full attention. attn_res_block_size: layers of a block
    of Attention Residuals; 0: plain residuals.
    """

    def __init__(self, layers, vocab_size, hidden_size, intermediate_size, kda_heads, kda_head_dim,
                 n_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank,
                 attn_res_block_size=0, conv_width=4, rms_norm_eps=1e-5):
        self.layers, self.vocab_size, self.hidden_size = layers, vocab_size, hidden_size
        self.intermediate_size = intermediate_size
        self.kda_heads, self.kda_head_dim, self.conv_width = kda_heads, kda_head_dim, conv_width
        self.n_heads, self.v_head_dim, self.kv_lora_rank = n_heads, v_head_dim, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.attn_res_block_size, self.rms_norm_eps = attn_res_block_size, rms_norm_eps


class Weight(nn.Module):
    """One tensor, called `weight` as all matrices and norms of the layout are."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(value)


def matrix(rows, cols, gain=1.0):
    return Weight(torch.randn(rows, cols) * (gain / math.sqrt(cols)))


def ones(n):
    return Weight(torch.ones(n))


class KDA(nn.Module):
    CHUNK = 16

    def __init__(self, c, out_gain):
        super().__init__()
        d, H, K = c.hidden_size, c.kda_heads, c.kda_head_dim
        self.H, self.K, self.eps = H, K, c.rms_norm_eps
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, matrix(H * K, d, 0.6))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, Weight(torch.rand(H * K, 1, c.conv_width) - 0.5))
        self.f_a_proj, self.f_b_proj = matrix(K, d, 0.6), matrix(H * K, K, 0.6)
        self.b_proj, self.g_proj = matrix(H, d, 0.6), matrix(H * K, d, 0.6)
        self.A_log = nn.Parameter(torch.zeros(1, 1, H, 1))
        step = torch.exp(torch.empty(H * K).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives step
        self.o_norm, self.o_proj = ones(K), matrix(d, H * K, 0.6 * out_gain)

    def weights(self, norm):
        """Arguments of kda_inputs behind x; all projections of x are one matrix."""
        w_in = torch.cat([m.weight for m in (self.q_proj, self.k_proj, self.v_proj, self.f_a_proj,
                                             self.b_proj, self.g_proj)])
        conv = torch.cat([m.weight for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        return (norm, w_in, conv.squeeze(1), self.f_b_proj.weight, self.A_log.reshape(-1),
                self.dt_bias, self.H, self.K, self.eps)

    def forward(self, x, norm):
        B, T, _ = x.shape
        fusible = self.training and bool(COMPILED)
        m, b, *rest = call(kda_before, self, x, *self.weights(norm), self.CHUNK, fusible)
        return call(kda_after, self, ChunkScan.apply(m, b), *rest, self.o_norm.weight,
                    self.o_proj.weight, B, T, self.H, self.K, self.eps)


class MLA(nn.Module):
    def __init__(self, c, out_gain):
        super().__init__()
        d, H = c.hidden_size, c.n_heads
        nope, rope, v, latent = (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
                                 c.kv_lora_rank)
        self.sizes = (H, nope, rope, v, latent, c.rms_norm_eps)
        self.q_proj = matrix(H * (nope + rope), d)
        self.kv_a_proj_with_mqa = matrix(latent + rope, d)
        self.kv_a_layernorm = ones(latent)
        self.kv_b_proj = matrix(H * (nope + v), latent)
        self.g_proj, self.o_proj = matrix(H * v, d, 0.6), matrix(d, H * v, 0.6 * out_gain)

    def forward(self, x, norm):
        q, k, v, gate = call(mla_before, self, x, norm, self.q_proj.weight,
                             self.kv_a_proj_with_mqa.weight, self.kv_a_layernorm.weight,
                             self.kv_b_proj.weight, self.g_proj.weight, *self.sizes)
        return call(mla_after, self, causal_attention(q, k, v), gate, self.o_proj.weight)


class MLP(nn.Module):
    def __init__(self, c, out_gain):
        super().__init__()
        d, width = c.hidden_size, c.intermediate_size
        self.eps = c.rms_norm_eps
        self.gate_proj, self.up_proj = matrix(width, d), matrix(width, d)
        self.down_proj = matrix(d, width, out_gain)

    def forward(self, x, norm):
        w_gate_up = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        return call(feed_forward, self, x, norm, w_gate_up, self.down_proj.weight, self.eps)


class Layer(nn.Module):
    """With Attention Residuals, a pseudo-query each for attention and feed-forward, zero at first:
    a plain mean of the sources. The layout's norm weight multiplies the query, so it stays 1."""

    def __init__(self, c, kind, out_gain):
        super().__init__()
        self.self_attn = (KDA if kind == "k" else MLA)(c, out_gain)
        self.mlp = MLP(c, out_gain)
        self.input_layernorm, self.post_attention_layernorm = ones(c.hidden_size), ones(c.hidden_size)
        if c.attn_res_block_size:
            self.self_attention_res_proj = Weight(torch.zeros(1, c.hidden_size))
            self.mlp_res_proj = Weight(torch.zeros(1, c.hidden_size))


class Model(nn.Module):
    """forward: ids [B, T] to logits [B, T, vocab_size]."""

    def __init__(self, c, dropout=0.0):
        super().__init__()
        self.config, self.dropout = c, dropout
        out_gain = (2 * len(c.layers)) ** -0.5
        self.model = nn.Module()
        self.model.embed_tokens = Weight(torch.randn(c.vocab_size, c.hidden_size) * 0.2)
        self.model.layers = nn.ModuleList([Layer(c, kind, out_gain) for kind in c.layers])
        self.model.norm = ones(c.hidden_size)
        if c.attn_res_block_size:
            self.model.output_attn_res_proj = Weight(torch.zeros(1, c.hidden_size))
        self.lm_head = matrix(c.vocab_size, c.hidden_size, 0.5)

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def plain(self, x, sums):
        for layer in self.model.layers:
            x = x + self.drop(layer.self_attn(x, layer.input_layernorm.weight))
            x = x + self.drop(layer.mlp(x, layer.post_attention_layernorm.weight))
            sums.append(x)
        return x

    def mix(self, query, blocks, partial):
        if not blocks:
            return partial
        return call(attention_residual, self, query.weight.reshape(-1), self.config.rms_norm_eps,
                    *blocks, partial)

    def residual_attention(self, x, sums):
        """Finished blocks are kept, the first being the embedding; `partial` is the running sum."""
        blocks, partial = [], x
        for i, layer in enumerate(self.model.layers):
            x = self.mix(layer.self_attention_res_proj, blocks, partial)
            starts = i % self.config.attn_res_block_size == 0
            if starts:
                blocks.append(partial)
            y = self.drop(layer.self_attn(x, layer.input_layernorm.weight))
            partial = y if starts else partial + y
            x = self.mix(layer.mlp_res_proj, blocks, partial)
            y = self.drop(layer.mlp(x, layer.post_attention_layernorm.weight))
            partial = partial + y
            sums.append(partial)
        return self.mix(self.model.output_attn_res_proj, blocks, partial)

    def forward(self, ids, sums=None):
        """sums: a list that takes the running sum after the embedding and after each layer."""
        T = ids.shape[1]
        ids = F.pad(ids, (0, -T % KDA.CHUNK))  # later tokens change nothing before them
        x = F.embedding(ids, self.model.embed_tokens.weight)
        sums = [] if sums is None else sums
        sums.append(x)
        x = (self.residual_attention if self.config.attn_res_block_size else self.plain)(x, sums)
        x = rms_norm(x, self.model.norm.weight, self.config.rms_norm_eps)
        return F.linear(x, self.lm_head.weight)[:, :T]


def n_parameters(model):
    return sum(p.numel() for p in model.parameters())


# ---- --check ----


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check_case(dtype, chunk, strength, fusible, device):
    """Relative L2 differences of outputs and of the gradients by q, k, v, g, beta."""
    torch.manual_seed(0)
    B, T, H, K, V = 2, 96, 2, 16, 24

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(device)

    inputs = [l2_norm(normal(B, T, H, K)) * K ** -0.5, l2_norm(normal(B, T, H, K)),
              normal(B, T, H, V), -strength * F.softplus(2 * normal(B, T, H, K)),
              torch.sigmoid(2 * normal(B, T, H))]
    weight = normal(B, T, H, V)
    exact = [x.clone().requires_grad_() for x in inputs]
    expected = recurrent_kda(*exact)
    (expected * weight).sum().backward()
    rounded = [x.to(dtype).requires_grad_() for x in (x.clone() for x in inputs)]
    found = chunk_kda(*rounded, chunk=chunk, fusible=fusible)
    (found * weight.to(dtype)).sum().backward()
    return [relative(found, expected)] + [relative(a.grad, b.grad) for a, b in zip(rounded, exact)]


def check(device):
    bounds = {torch.float64: 1e-12, torch.float32: 1e-4}
    good = True
    print("relative difference of the chunked form from the float64 recurrence, on %s" % device)
    print("type     chunk decay fusible     o      dq      dk      dv      dg   dbeta")
    for dtype, bound in bounds.items():
        for chunk in (16, 32):
            for strength in (0.01, 1.0, 30.0):
                for fusible in (False, True):
                    errors = check_case(dtype, chunk, strength, fusible, device)
                    ok = all(e <= bound for e in errors)
                    good = good and ok
                    print("%-8s %5d %5g %7s %s%s" % (
                        str(dtype)[6:], chunk, strength, fusible,
                        " ".join("%7.1e" % e for e in errors), "" if ok else "  TOO LARGE"))
    return good


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--check", action="store_true", required=True)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = arguments.parse_args().device
    torch.set_float32_matmul_precision("highest")
    if not check(device):
        sys.exit("kda.py: the chunked form differs from the recurrence")
    print("kda.py: the chunked form is the recurrence")


if __name__ == "__main__":
    main()
