"""Costs of the two ends of the model: embedding with the encoder tower, and head with the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.flops import embedding_operations, head_operations
from planner.layer import LayerCosts, accumulate, add, add_comm, dense_part
from planner.layout import Layout
from planner.operations import shard_of
from planner.parallel import tensor_parallel
from planner.setting import Setting


def edge_costs(
    layout: Layout, setting: Setting, padded_vocab: Any
) -> tuple[LayerCosts, LayerCosts]:
    """Embedding (with the encoder tower) and head with loss, for a table of layouts."""
    model, train, runtime = setting.model, setting.train, setting.runtime
    x = shard_of(layout, model, train, runtime, flash=setting.flash)
    first, head = LayerCosts(), LayerCosts()
    accumulate(first, embedding_operations(model, x), setting)
    accumulate(head, head_operations(model, x, padded_vocab), setting)
    first_ops, head_ops = tensor_parallel.edge_comm_ops(
        model, x.tokens, layout.tp, x.element_bytes, runtime.sequence_parallel
    )
    none = {"forward": 0.0, "backward": 0.0}
    add_comm(first, first_ops, "tensor_parallel", 0.0, layout, setting, none)
    if model.lm_head:
        add_comm(head, head_ops, "tensor_parallel", 0.0, layout, setting, none)
    if model.tower is not None:
        tower = model.tower
        encoder = replace(
            model,
            hidden_size=tower.hidden_size,
            kinds=(tower.layer,),
            layer_kinds=(0,) * tower.num_hidden_layers,
            positions="learned",
            tower=None,
        )
        images = replace(train, seq_len=tower.tokens)
        flat = layout.with_(cp=1, cp_kind=0)
        one = dense_part(tower.layer, flat, replace(setting, model=encoder, train=images), False)
        for name, value in one.forward_s.items():
            add(first.forward_s, name, tower.num_hidden_layers * value)
        for name, value in one.backward_s.items():
            add(first.backward_s, name, tower.num_hidden_layers * value)
        first.kept_bytes[0] = first.kept_bytes[0] + tower.num_hidden_layers * one.kept_bytes[0]
        first.forward_flops = first.forward_flops + tower.num_hidden_layers * one.forward_flops
    return first, head
