"""softdb.nn.ProductKeys, against every one of its m² keys."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.nn import ProductKeys


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def small_memory(**words: Any) -> ProductKeys:
    return ProductKeys(**{"dim": 6, "num_keys": 7, "value_dim": 3, "num_heads": 2, "k": 5, **words}).double()


def every_score(memory: ProductKeys, inputs: Tensor) -> Tensor:
    """Scores of all m² keys, (q, heads, m²), each key written out."""
    queries = torch.nn.functional.linear(inputs, memory.query.weight, memory.query.bias)
    m, d = memory.num_keys, memory.key_dim
    found = []
    for h in range(memory.num_heads):
        keys = torch.stack(
            [torch.cat([memory.keys[h, 0, i], memory.keys[h, 1, j]]) for i in range(m) for j in range(m)]
        )
        found.append(queries[:, h * d : (h + 1) * d] @ keys.T)
    return torch.stack(found, dim=1)


def brute_force(memory: ProductKeys, inputs: Tensor) -> Tensor:
    """The equation as it stands, (q, v)."""
    scores = every_score(memory, inputs)
    rows = []
    for q in range(len(inputs)):
        row = torch.zeros(memory.value_dim, dtype=inputs.dtype)
        for h in range(memory.num_heads):
            best, slots = scores[q, h].sort(descending=True)
            row = row + best[: memory.k].softmax(0) @ memory.values[slots[: memory.k]]
        rows.append(row)
    return torch.stack(rows)


SHAPES: list[dict[str, Any]] = [
    {},
    {"num_heads": 1, "k": 1},
    {"num_keys": 3, "k": 9},  # every slot
    {"num_keys": 4, "k": 11},  # more than a codebook has
    {"num_keys": 1, "k": 1},
    {"key_dim": 4, "num_keys": 16, "k": 32},
]


@pytest.mark.parametrize("words", SHAPES)
def test_answers_and_gradients_are_the_softmax_over_the_best_of_all_keys(words: dict[str, Any]) -> None:
    memory = small_memory(**words)
    inputs = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(9, 3, dtype=torch.float64)
    wanted = {"inputs": inputs, **dict(memory.named_parameters())}
    gradients = []
    for answer in (memory(inputs), brute_force(memory, inputs)):
        for one in wanted.values():
            one.grad = None
        torch.autograd.backward(answer, upstream)
        gradients.append((answer.detach(), {name: _dense(one.grad) for name, one in wanted.items()}))
    (mine, my_gradients), (truth, true_gradients) = gradients
    torch.testing.assert_close(mine, truth)
    for name in wanted:
        torch.testing.assert_close(my_gradients[name], true_gradients[name], msg=f"the gradient of {name}")


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense().clone()


@pytest.mark.parametrize("k", [1, 2, 5, 16, 49])
def test_the_best_of_halves_hold_the_best_of_all(k: int) -> None:
    memory = small_memory(k=k)
    inputs = torch.randn(200, 6, dtype=torch.float64)
    slots, scores = memory.find(inputs)
    every = every_score(memory, inputs)
    torch.testing.assert_close(scores, every.topk(k).values)
    torch.testing.assert_close(scores, every.gather(2, slots))
    assert all(len(set(one)) == k for one in slots.flatten(0, 1).tolist())  # no slot twice


def test_ties_and_zero_queries_find_k_distinct_slots() -> None:
    memory = small_memory(k=6)
    with torch.no_grad():
        memory.query.bias.zero_()
        memory.keys[:, :, 1] = memory.keys[:, :, 0]  # duplicates
        memory.keys[:, :, 2] = 0
    inputs = torch.cat([torch.zeros(1, 6), torch.randn(20, 6)]).double()
    slots, scores = memory.find(inputs)
    torch.testing.assert_close(scores, every_score(memory, inputs).topk(6).values)
    assert all(len(set(one)) == 6 for one in slots.flatten(0, 1).tolist())


def test_gradcheck() -> None:
    memory = small_memory(num_keys=4, k=3)
    inputs = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    keys, weight = memory.keys.detach().clone().requires_grad_(), memory.query.weight.detach().clone().requires_grad_()

    def asked(inputs: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        parameters = {"learnt.codebooks": keys, "query.weight": weight}
        actual: Tensor = torch.func.functional_call(memory, parameters, (inputs,))
        return actual

    assert torch.autograd.gradcheck(asked, (inputs, keys, weight))


def test_only_the_values_of_retrieved_slots_get_a_gradient() -> None:
    memory = small_memory()
    inputs = torch.randn(2, 6, dtype=torch.float64)
    memory(inputs).sum().backward()  # type: ignore[no-untyped-call]
    grad = memory.values.grad
    assert grad is not None
    assert grad.is_sparse
    assert set(grad._indices()[0].tolist()) == set(memory.find(inputs)[0].flatten().tolist())


def test_a_step_holds_no_gradient_as_large_as_the_memory() -> None:
    memory = ProductKeys(16, num_keys=256, value_dim=64, num_heads=1, k=4)
    memory(torch.randn(2, 16)).sum().backward()  # type: ignore[no-untyped-call]
    grad = memory.values.grad
    assert grad is not None
    assert grad._values().numel() == 2 * 4 * 64  # of 65,536 slots


def test_product_keys_learn_to_recall() -> None:
    memory = ProductKeys(8, num_keys=12, value_dim=4, num_heads=2, k=8)
    inputs, targets = torch.randn(64, 8), torch.randn(64, 4)
    others = [p for name, p in memory.named_parameters() if name != "values"]
    sparse: torch.optim.Optimizer = torch.optim.SparseAdam([memory.values], lr=0.03)
    dense: torch.optim.Optimizer = torch.optim.Adam(others, lr=0.01)
    losses = []
    for _ in range(150):
        loss = (memory(inputs) - targets).square().mean()
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in (sparse, dense):
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


def test_query_norm_is_a_batch_norm_of_the_queries() -> None:
    memory = small_memory(query_norm=True)
    inputs = 100 * torch.randn(50, 6, dtype=torch.float64) + 30
    queries = memory._queries(inputs).flatten(1)
    torch.testing.assert_close(queries.mean(0), torch.zeros(12, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(queries.std(0, correction=0), torch.ones(12, dtype=torch.float64), atol=1e-4, rtol=0)
    assert memory.eval()(inputs[:1]).shape == (1, 3)  # one alone is fine outside training


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 6), (2, 0, 6)])
def test_leading_dimensions_are_preserved(shape: tuple[int, ...]) -> None:
    memory = small_memory()
    inputs = torch.randn(shape, dtype=torch.float64)
    output = memory(inputs)
    assert output.shape == (*shape[:-1], 3)
    if inputs.numel():
        torch.testing.assert_close(output.reshape(-1, 3), brute_force(memory, inputs.reshape(-1, 6)))
    assert memory.find(inputs)[0].shape == (*shape[:-1], 2, 5)


def test_the_same_seed_makes_the_same_memory() -> None:
    torch.manual_seed(1)
    one = small_memory().state_dict()
    torch.manual_seed(1)
    for name, other in small_memory().state_dict().items():
        assert torch.equal(one[name], other)


def test_state_and_copies_answer_alike() -> None:
    memory, other = small_memory(), small_memory()
    inputs = torch.randn(4, 6, dtype=torch.float64)
    assert not torch.equal(memory(inputs), other(inputs))
    held = io.BytesIO()
    torch.save(memory.state_dict(), held)
    held.seek(0)
    other.load_state_dict(torch.load(held))
    for twin in (other, copy.deepcopy(memory)):
        assert torch.equal(memory(inputs), twin(inputs))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"key_dim": 5}, "key_dim is 5; expected an even width"),
        ({"key_dim": 1}, "key_dim is 1; expected a whole number at least 2"),
        ({"k": 50}, "k is 50; expected a whole number from 1 to 49"),
        ({"num_keys": 0}, "num_keys is 0; expected a whole number at least 1"),
        ({"num_heads": 1.5}, "num_heads is 1.5; expected a whole number at least 1"),
        ({"value_dim": -1}, "value_dim is -1"),
        ({"dim": 7}, "key_dim is 7; expected an even width"),
    ],
)
def test_bad_settings_are_refused_by_name(words: dict[str, Any], match: str) -> None:
    with pytest.raises(BadInput, match=match):
        small_memory(**words)


def test_inputs_that_do_not_fit() -> None:
    memory = small_memory()
    with pytest.raises(BadInput, match=r"inputs have shape \(2, 5\) but this memory takes \(…, 6\)"):
        memory(torch.zeros(2, 5).double())
    with pytest.raises(BadInput, match="expected a floating tensor"):
        memory(torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(BadInput, match="queries hold NaN or infinity"):
        memory(torch.full((2, 6), torch.nan).double())
    with pytest.raises(BadInput, match="a batch norm in training got 1 inputs"):
        small_memory(query_norm=True)(torch.zeros(1, 6).double())


def test_inputs_of_another_dtype() -> None:
    memory = ProductKeys(6, num_keys=5, value_dim=3, num_heads=2, k=4)
    with pytest.raises(BadInput, match=r"inputs are torch.float64 but this memory is torch.float32"):
        memory(torch.zeros(2, 6, dtype=torch.float64))
    with torch.autocast("cpu"):
        assert memory(torch.zeros(2, 6)).shape == memory(torch.zeros(2, 6, dtype=torch.bfloat16)).shape == (2, 3)
        with pytest.raises(BadInput, match=r"inputs are torch.float64"):
            memory(torch.zeros(2, 6, dtype=torch.float64))


def test_caches_of_inference_mode_serve_training() -> None:
    memory = small_memory(k=13)
    inputs = torch.randn(4, 6, dtype=torch.float64)
    with torch.inference_mode():
        memory(inputs)
    memory(inputs).sum().backward()  # type: ignore[no-untyped-call]
    assert memory.keys.grad is not None


def test_product_keys_train_in_data_parallel() -> None:
    """DistributedDataParallel reduces the sparse gradient of the values beside dense ones; a line of works-with.md."""
    memory, inputs = ProductKeys(6, num_keys=5, value_dim=3, num_heads=2, k=4, query_norm=True), torch.randn(8, 6)
    memory(inputs).square().sum().backward()  # type: ignore[no-untyped-call]
    alone = {name: _dense(one.grad) for name, one in memory.named_parameters()}
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(memory)
        optimisers = [
            torch.optim.SparseAdam([memory.values]),
            torch.optim.Adam([one for name, one in memory.named_parameters() if name != "values"]),
        ]
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(inputs).square().sum().backward()
        assert memory.values.grad is not None
        assert memory.values.grad.is_sparse
        for name, one in memory.named_parameters():
            torch.testing.assert_close(_dense(one.grad), alone[name], msg=name)
        for optimiser in optimisers:
            optimiser.step()
    finally:
        torch.distributed.destroy_process_group()
