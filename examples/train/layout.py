"""Models in the published layout: a directory of config.json and model.safetensors.

A model with plain residuals has the layout of Kimi-Linear-48B-A3B. One with Attention Residuals has
that of Kimi K3's text part: the configuration under `text_config`, names behind `language_model.`.
Both use two keys that are K3's: KDA's output gate of full rank, and MLA's output gate.
"""
import json
import os
import struct

import torch

import kda

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
K3_PREFIX = "language_model."
RES_PROJ, RES_NORM = "res_proj.weight", "res_norm.weight"


# ---- safetensors ----


def write_safetensors(path, tensors):
    """tensors: name to tensor of a type in DTYPES. The header is padded, so that data is aligned."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".part", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    os.replace(path + ".part", path)


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            raw = torch.frombuffer(bytearray(data[start + first:start + last]), dtype=torch.uint8)
            tensors[name] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


# ---- Configuration ----


def layer_numbers(c, kind):
    return [i + 1 for i, letter in enumerate(c.layers) if letter == kind]


def to_json(c):
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "float16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(c.layers),
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": False,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_heads,
        "q_lora_rank": None,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": None,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "kda_layers": layer_numbers(c, "k"),
            "full_attn_layers": layer_numbers(c, "f"),
            "num_heads": c.kda_heads,
            "head_dim": c.kda_head_dim,
            "short_conv_kernel_size": c.conv_width,
            "use_full_rank_gate": True,
        },
    }
    if not c.attn_res_block_size:
        return text
    text["attn_res_block_size"] = c.attn_res_block_size
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
            "dtype": "float16", "text_config": text}


def from_json(value):
    text = value.get("text_config", value)
    linear = text["linear_attn_config"]
    layers = "".join("k" if i + 1 in linear["kda_layers"] else "f"
                     for i in range(text["num_hidden_layers"]))
    same = ("vocab_size", "hidden_size", "intermediate_size", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "rms_norm_eps")
    return kda.Config(layers, kda_heads=linear["num_heads"], kda_head_dim=linear["head_dim"],
                      n_heads=text["num_attention_heads"],
                      conv_width=linear["short_conv_kernel_size"],
                      attn_res_block_size=text.get("attn_res_block_size") or 0,
                      **{key: text[key] for key in same})


# ---- Models ----


def prefix_of(c):
    return K3_PREFIX if c.attn_res_block_size else ""


def export(model, directory):
    """Writes a model: matrices, convolutions and norms in f16; A_log and dt_bias in float32."""
    tensors, prefix = {}, prefix_of(model.config)
    for name, tensor in model.state_dict().items():
        exact = name.endswith(("A_log", "dt_bias"))
        tensors[prefix + name] = tensor.detach().to(torch.float32 if exact else torch.float16).cpu()
        if name.endswith(RES_PROJ):
            norm = prefix + name[:-len(RES_PROJ)] + RES_NORM
            tensors[norm] = torch.ones(model.config.hidden_size, dtype=torch.float16)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError("%s: tensor %s is not finite" % (directory, name))
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(to_json(model.config), file, indent=1)
        file.write("\n")
    write_safetensors(os.path.join(directory, "model.safetensors"), tensors)


def load(directory, device="cpu"):
    """A model that export wrote, in float32, for evaluation."""
    with open(os.path.join(directory, "config.json")) as file:
        model = kda.Model(from_json(json.load(file)))
    tensors = read_safetensors(os.path.join(directory, "model.safetensors"))
    prefix, state = prefix_of(model.config), {}
    for name, tensor in tensors.items():
        if not name.endswith(RES_NORM):
            state[name[len(prefix):]] = tensor.float()
        elif not (tensor == 1).all():
            raise ValueError("%s: tensor %s: expected ones" % (directory, name))
    model.load_state_dict(state)
    return model.to(device).eval()
