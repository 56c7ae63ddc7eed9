"""The MoE layers of a Transformers model by its configuration alone: nothing is loaded."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_laer.choice import LayerSizes
from hf_laer.integrations.transformers.families import experts_modules, spec_of


def moe_layers(name: str) -> list[LayerSizes]:
    """The sizes of each MoE layer, in order.

    Args:
        name: A folder, or a name on the Hub.

    Raises:
        ValueError: The model cannot be made, has no MoE layer on the experts interface, or does not say its top-k.
    """
    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = []
    for layer, module in experts_modules(model).items():
        spec = spec_of(layer, module)
        if spec.top_k is None:
            raise ValueError(f"{name}: the configuration of {layer} does not say how many experts a token has")
        up, down = (module.get_parameter(key).shape for key in (spec.up, spec.down))
        intermediate = down[1] if spec.is_transposed else down[2]
        gated = up[2 if spec.is_transposed else 1] == 2 * intermediate
        found.append(LayerSizes(spec.num_experts, spec.hidden_size, int(intermediate), spec.top_k, gated))
    if not found:
        raise ValueError(f"{name} has no MoE layer on Transformers' experts interface")
    return found
