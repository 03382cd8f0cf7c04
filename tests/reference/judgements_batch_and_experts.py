"""Judgements of reports on batches, expert parallelism, padding and what runtimes combine."""

from dataclasses import replace

from planner.legality import (
    Situation,
    padded_vocab_size,
    parse_layout,
    statements,
)
from planner.runtime import load_runtime
from tests import samples_legality as sample
from tests.reference.reported import MEGATRON, Row, judge, judges, model_of, refused


@judges("I-037")
def fewer_micro_batches_than_stages(row: Row) -> None:
    warnings = judge(model_of(row), "pp=4", gpus=4, batch=2)
    assert any("2 micro-batches are fewer than the pp=4 stages" in text for text in warnings)
    error = refused(model_of(row), "pp=4", gpus=4, batch=2, runtime=load_runtime("torchtitan"))
    assert "or the run hangs" in error.message
    assert 4 in error.legal["num_microbatches"]


@judges("I-039")
def interleaved_rounds(row: Row) -> None:
    torch_runtime = load_runtime("fsdp2")
    for batch in (10, 3):
        judge(model_of(row), "pp=4 vpp=2", gpus=4, batch=batch, runtime=torch_runtime)
    error = refused(model_of(row), "pp=4 vpp=2", gpus=4, batch=10)
    assert "wants a multiple of pp=4" in error.message
    assert {8, 12} <= set(error.legal["num_microbatches"])


@judges("I-041")
def batch_ramp(row: Row) -> None:
    layout = "tp=8 pp=4 dp=12 micro_batch=1"
    runtime = load_runtime("megatron-deepspeed")
    judge(model_of(row), layout, gpus=384, batch=2040, seq_len=2048, runtime=runtime)
    error = refused(model_of(row), layout, gpus=384, batch=2043, seq_len=2048, runtime=runtime)
    assert 9 in error.legal["dp"]
    assert error.legal["global_batch_size"] == [2040, 2052]


@judges("I-043")
def two_grids(row: Row) -> None:
    # 8 GPUs: tp=4 and ep=8 share the ranks; a product of 32 would be wrong.
    assert judge(model_of(row), "tp=4 pp=1 cp=1 ep=8 etp=1", gpus=8) == []


@judges("I-045")
def expert_grid_prints_its_factors(row: Row) -> None:
    error = refused(model_of(row), "tp=1 pp=2 vpp=24 cp=1 ep=4 micro_batch=1", gpus=4, batch=512)
    assert "etp=1 x ep=4 x pp=2 = 8 does not divide the 4 GPUs" in error.message
    assert "dp=2 x tp=1 x pp=2 x cp=1 = 4" in error.message
    assert error.legal["ep"] == [1, 2]


@judges("I-047")
def ep_is_not_clamped(row: Row) -> None:
    model = sample.model(experts=64, top_k=2, moe_ffn=1024)
    error = refused(model, "ep=16", gpus=8)
    assert error.values["ep"] == 16
    assert error.legal["ep"] == [1, 2, 4, 8]


@judges("I-049")
def experts_over_efa(row: Row) -> None:
    model = sample.model(experts=64, top_k=2, moe_ffn=1024)
    efa = sample.cluster(network="efa-v2")
    warnings = judge(model, "ep=16", gpus=16, cluster=efa)
    assert any("DeepEP kernels do not run there" in text for text in warnings)
    assert any("ep=8 keeps it inside" in text for text in warnings)
    assert judge(model, "ep=8", gpus=16, cluster=efa) == []


@judges("I-051")
def sequence_multiple(row: Row) -> None:
    model = model_of(row)
    judge(model, "cp=4 tp=4", gpus=16, seq_len=16)
    error = refused(model, "cp=4 tp=4", gpus=16, seq_len=8)
    assert error.values["multiple"] == 16
    judge(model, "cp=2 tp=1", gpus=2, seq_len=4)
    assert refused(model, "cp=2 tp=1", gpus=2, seq_len=2).values["multiple"] == 4


@judges("I-053")
def odd_sequence_with_sequence_parallelism(row: Row) -> None:
    error = refused(model_of(row), "tp=4", gpus=4, seq_len=2047)
    assert "tp=4 with sequence parallelism" in error.message
    assert error.legal["seq_len"] == [2044, 2048]
    assert "cp=4" in refused(model_of(row), "cp=4", gpus=4, seq_len=2047).message


@judges("I-055")
def pad_for_ulysses(row: Row) -> None:
    runtime = load_runtime("deepspeed")
    error = refused(model_of(row), "cp=8 cp_kind=ulysses", gpus=8, seq_len=8423, runtime=runtime)
    assert "pad 8423 to 8424" in error.message


@judges("I-057")
def fp8_shapes(row: Row) -> None:
    error = refused(model_of(row), "cp=2", gpus=2, seq_len=4104, precision="fp8")
    assert "2052 is not a multiple of 16" in error.message
    assert "pad it to 2064" in error.message
    assert error.legal["seq_len"] == [4128]
    judge(model_of(row), "cp=2", gpus=2, seq_len=4128, precision="fp8")


@judges("I-059")
def vocabulary_of_six_ranks(row: Row) -> None:
    assert padded_vocab_size(151552, 1, 6) == 151554
    error = refused(model_of(row), "tp=6", gpus=6, runtime=load_runtime("fsdp2"))
    assert "num_key_value_heads=8" in error.message
    assert "num_attention_heads" not in error.message  # 96 heads are fine
    assert error.legal["tp"] == [1, 2, 4, 8]


@judges("I-061")
def padded_rows_are_stripped(row: Row) -> None:
    situation = Situation(model_of(row), sample.train(), sample.cluster(), load_runtime("fsdp2"), 2)
    text = " ".join(statements(parse_layout("tp=2", 2), situation))
    assert "Vocabulary 65535 is padded to 65536" in text
    assert "stripped from a saved checkpoint" in text


@judges("I-063")
def padded_alike(row: Row) -> None:
    assert padded_vocab_size(49159, 64, 1) == 49216
    runtime = replace(load_runtime("fsdp2"), vocab_multiple=32)  # 32 x tp=2 is the report's 64
    situation = Situation(model_of(row), sample.train(), sample.cluster(), runtime, 2)
    text = " ".join(statements(parse_layout("tp=2", 2), situation))
    assert "padded to 49216" in text
    assert "embedding and head alike" in text


@judges("I-065")
def whole_moe_recompute_with_overlap(row: Row) -> None:
    model = sample.model(experts=64, top_k=2, moe_ffn=1024)
    overlapped = replace(MEGATRON, ep_overlap_fraction=0.9, selective_modules=("moe",))
    error = refused(model, "ep=8 recompute=selective", gpus=8, runtime=overlapped)
    assert "dispatch included" in error.message
    assert "selective" not in error.legal["recompute"]
    assert "full" not in error.legal["recompute"]
    judge(model, "ep=8 recompute=selective", gpus=8)
    kept = replace(overlapped, selective_modules=("moe_activation",))
    judge(model, "ep=8 recompute=selective", gpus=8, runtime=kept)


@judges("I-067")
def sharded_parameters_and_pipeline(row: Row) -> None:
    error = refused(model_of(row), "pp=2 zero=3", gpus=8)
    assert "pp must be 1" in error.message
    assert error.legal["pp"] == [1]
    judge(model_of(row), "pp=1 zero=3", gpus=8)


@judges("I-069")
def one_model_at_a_time(row: Row) -> None:
    # Reinforcement learning runs several models; here each is a layout of its own, and its GPUs are
    # the product of its degrees: four of 8 and four engines of tp=2.
    trained = parse_layout("tp=1 dp=8").num_gpus
    engine = parse_layout("tp=2 dp=1").num_gpus
    assert 4 * trained + 4 * engine == int(row["n_gpus"])


@judges("I-071")
def fp32_by_omission(row: Row) -> None:
    warnings = judge(model_of(row), "dp=8", gpus=8, precision="fp32")
    assert any("Precision is fp32" in text and "bf16" in text for text in warnings)
    assert judge(model_of(row), "dp=8", gpus=8, precision="bf16") == []
