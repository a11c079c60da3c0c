"""Following the advice of an error gives the answer: modules, losses, memories, training."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advice import KEYS, QUERIES, VALUES, Steps, advice, labelled, with_values
from torch import nn
from worlds import holding

import softdb
import softdb.train
from softdb import nn as soft
from softdb import scores

# -- modules -----------------------------------------------------------------------------------------------------------


@advice("pass k=, or call db.attend(attention.fold(query).queries, score=Dot()).explain()")
def test_weights_of_a_module_are_of_the_nearest(folder: Path) -> Steps:
    with holding(KEYS, KEYS) as db:
        attention = soft.Attention(db, 4, 2, batch_first=True)
        query = QUERIES[None]
        yield lambda: attention(query, need_weights=True)
        assert attention(query, need_weights=True, k=5)[1] is not None
        explained = db.attend(attention.fold(query).queries, score=scores.Dot()).explain()
        assert len(explained) == 6


@advice("pass k= to drop weights of the k nearest, or make the module with dropout=0")
def test_dropout_is_of_the_nearest(folder: Path) -> Steps:
    with holding(KEYS, KEYS) as db:
        attention = soft.Attention(db, 4, 2, dropout=0.5)
        yield lambda: attention(QUERIES)
        assert attention(QUERIES, k=5)[0].shape == QUERIES.shape
        assert soft.Attention(db, 4, 2, dropout=0)(QUERIES)[0].shape == QUERIES.shape


@advice("or use db=None with the records as tensors")
def test_masks_of_records_are_bool(folder: Path) -> Steps:
    with holding(KEYS, KEYS) as db:
        attention, keys = soft.Attention(db, 4, 2), torch.from_numpy(KEYS)
        mask = torch.full((3, 50), 0.5)
        yield lambda: attention(QUERIES, attn_mask=mask)
        assert attention(QUERIES, attn_mask=torch.zeros(3, 50, dtype=torch.bool))[0].shape == QUERIES.shape
        plain = soft.Attention(None, 4, 2)
        assert plain(QUERIES, keys, keys, attn_mask=mask)[0].shape == QUERIES.shape


@advice("open one with num_classes=, or use pooled_loss")
def test_a_loss_of_labels_needs_labels(folder: Path) -> Steps:
    with with_values() as db, labelled() as classes:
        yield lambda: soft.label_loss(db, QUERIES, [0, 1, 2])
        assert soft.label_loss(classes, QUERIES, [0, 1, 2]).isfinite()
        assert soft.pooled_loss(db, QUERIES, torch.zeros(3, 2)).isfinite()


@advice("make one with memory.parameters()")
def test_an_optimiser_is_of_the_memory(folder: Path) -> Steps:
    with with_values() as db:
        memory = soft.Memory(db, k=5)
        yield lambda: memory.check(torch.optim.SparseAdam([nn.Parameter(torch.ones(3))]))
        memory.check(torch.optim.SparseAdam(list(memory.parameters())))


@advice("call reload(), which drops only these, then commit again", softdb.StaleRead)
def test_a_memory_reloads_the_changes_of_others(folder: Path) -> Steps:
    with with_values() as db:
        memory = soft.Memory(db, k=50)
        optimizer = torch.optim.SparseAdam(list(memory.parameters()), lr=0.1)
        memory(QUERIES).output.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # type: ignore[no-untyped-call]
        db.delete([7])
        yield lambda: memory.commit()
        memory.reload()
        assert memory.commit() == 49
        assert not np.array_equal(db.get([8]).keys.numpy()[0], KEYS[8])


@advice("leave values out")
def test_labels_are_not_trained(folder: Path) -> Steps:
    with labelled() as db:
        yield lambda: soft.Memory(db, k=5, values=True)
        assert soft.Memory(db, k=5)(QUERIES).output.shape == (3, 3)


@advice("keep the memory in float32, memory.float(), and the rest of the model as it is")
def test_a_memory_is_in_float32(folder: Path) -> Steps:
    with with_values() as db:
        memory = soft.Memory(db, k=5)
        memory.half()
        yield lambda: memory(QUERIES)
        memory.float()
        assert memory(QUERIES).output.isfinite().all()


@advice("convert one with .to()")
def test_product_keys_take_their_dtype(folder: Path) -> Steps:
    memory = soft.ProductKeys(4, 4, 4, k=2, key_dim=4)
    yield lambda: memory(QUERIES.double())
    assert memory(QUERIES.double().to(torch.float32)).shape == QUERIES.shape
    assert memory.to(torch.float64)(QUERIES.double()).shape == QUERIES.shape


@advice("give two or more, call eval(), or make the memory with query_norm=False")
def test_a_batch_norm_takes_two(folder: Path) -> Steps:
    memory = soft.ProductKeys(4, 4, 4, k=2, key_dim=4, query_norm=True)
    yield lambda: memory(QUERIES[:1])
    assert memory(QUERIES[:2]).shape == (2, 4)
    memory.eval()
    assert memory(QUERIES[:1]).shape == (1, 4)
    assert soft.ProductKeys(4, 4, 4, k=2, key_dim=4, query_norm=False)(QUERIES[:1]).shape == (1, 4)


@advice("pass learnable=False, with the bandwidth of softdb.scores.leave_one_out, or use epanechnikov")
def test_a_boxcar_is_not_trained(folder: Path) -> Steps:
    with with_values("l2") as db:
        yield lambda: soft.KernelRegressor(db, "boxcar")
        width = scores.leave_one_out(torch.from_numpy(KEYS), torch.from_numpy(VALUES), kernel=scores.Boxcar)
        assert soft.KernelRegressor(db, "boxcar", width, learnable=False)(QUERIES).shape == (3, 2)
        assert soft.KernelRegressor(db, "epanechnikov")(QUERIES).shape == (3, 2)


@advice("make the module with learnable=True")
def test_a_bandwidth_that_is_fitted_is_learnable(folder: Path) -> Steps:
    with with_values("l2") as db:
        yield lambda: soft.KernelRegressor(db, learnable=False).fit()
        soft.KernelRegressor(db, learnable=True).fit(steps=2)


@advice("call reindex(), choose a policy that keeps up, or allow a greater age", softdb.StaleRead)
def test_a_stale_index_is_rebuilt(folder: Path) -> Steps:
    with with_values() as db:
        encoder = nn.Linear(4, 4)
        view = soft.View(db, encoder, max_age=1, reindex=None)
        view.search(QUERIES, 3)
        for _ in range(3):
            view.step()
        yield lambda: view.search(QUERIES, 3)
        view.reindex()
        assert view.search(QUERIES, 3).rows.shape == (3, 3)
        for keeping in (soft.View(db, encoder, max_age=1, reindex=1), soft.View(db, encoder, max_age=9, reindex=None)):
            keeping.search(QUERIES, 3)
            for _ in range(3):
                keeping.step()
            assert keeping.search(QUERIES, 3).rows.shape == (3, 3)


@advice("wait for that build, then commit")
def test_a_commit_waits_for_a_build(folder: Path) -> Steps:
    pytest.importorskip("faiss", reason="an approximate index needs FAISS")
    begun, go = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        go.wait(60)

    with holding(np.random.default_rng(3).normal(size=(1200, 4))) as db:
        memory = soft.Memory(db, k=5)
        build = db.build_index("ivf", background=True, progress=hold)
        assert begun.wait(60)
        yield lambda: memory.commit(reindex=True)
        go.set()
        build.result()
        memory.commit(reindex=True)


@advice("use score='general' or 'additive'")
def test_dot_products_compare_equal_widths(folder: Path) -> Steps:
    yield lambda: soft.RecurrentAttention(4, 6, score="dot")
    for score in ("general", "additive"):
        context, _ = soft.RecurrentAttention(4, 6, score=score)(QUERIES, torch.ones(3, 5, 6))
        assert context.shape == (3, 6)


@advice("expected EverySteps(n), OnRecall(target), InBackground(n), Never(), a number of steps, or None")
def test_a_view_is_reindexed_by_a_policy(folder: Path) -> Steps:
    policies = soft.EverySteps(2), soft.OnRecall(0.9), soft.InBackground(2), soft.Never(), 2, None
    with with_values() as db:
        wrong: Any = "often"
        yield lambda: soft.View(db, nn.Identity(), reindex=wrong)
        for policy in policies:
            assert soft.View(db, nn.Identity(), reindex=policy).search(QUERIES, 2).rows.shape == (3, 2)


def require_fit(db: softdb.SoftDB, right: list[int], **words: Any) -> None:
    fitted = softdb.train.fit(db, torch.from_numpy(KEYS[: len(right)]), right, epochs=1, **words)
    assert len(fitted.history) == 1


@advice(" leaves the training or a held-out set empty")
def test_training_holds_some_pairs_out(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: require_fit(db, [0, 0, 0, 0])
        with pytest.raises(softdb.BadInput, match=r"give more pairs, such as \d+ that share none$") as error:
            require_fit(db, [0, 0, 0, 0])
        require_fit(db, list(range(int(str(error.value).split()[-4]))))
        with pytest.raises(softdb.BadInput, match=r"another holdout, or patience None \(--patience 0"):
            require_fit(db, [0, 1, 2, 2])
        require_fit(db, [0, 1, 2, 2], holdout=0.5)
        require_fit(db, [0, 1, 2, 2], patience=None)


@advice("the projection has no encoder of keys; train with keys (--keys)")
def test_only_trained_keys_are_applied(folder: Path) -> Steps:
    with holding(KEYS) as db:
        queries = torch.from_numpy(KEYS)
        fitted = softdb.train.fit(db, queries, list(range(50)), epochs=1)
        yield lambda: softdb.train.apply(db, fitted.projection)
        fitted = softdb.train.fit(db, queries, list(range(50)), epochs=1, keys=True)
        assert softdb.train.apply(db, fitted.projection) is not None


@advice("continue from it with resume, or remove it")
def test_a_run_resumes_from_the_advised_checkpoint(folder: Path) -> Steps:
    with with_values() as db:
        file = folder / "run.ckpt"
        require_fit(db, list(range(50)), checkpoint=file, patience=None)
        yield lambda: require_fit(db, list(range(50)), checkpoint=file, patience=None)
        require_fit(db, list(range(50)), checkpoint=file, patience=None, resume=True)
        file.unlink()
        require_fit(db, list(range(50)), checkpoint=file, patience=None)


# -- several processes and transforms ----------------------------------------------------------------------------------


@advice("fully_shard(model, ignored_params=set(memory.parameters())) and DistributedDataParallel(memory)")
def test_a_memory_is_left_out_of_shards(folder: Path) -> Steps:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with with_values() as db:
            yield lambda: fully_shard(soft.Memory(db, k=5), mesh=mesh)
            memory = soft.Memory(db, k=5)
            wrapped = nn.parallel.DistributedDataParallel(memory)
            model = nn.Sequential(nn.Linear(4, 4), wrapped)
            fully_shard(model, mesh=mesh, ignored_params=set(memory.parameters()))
            model(QUERIES).output.sum().backward()
            assert memory.keys is not None
            assert memory.keys.grad is not None
    finally:
        torch.distributed.destroy_process_group()


@advice("use torch.autograd.grad or backward() for the gradient, and leading dimensions or one call with all queries")
def test_a_transform_of_torch_func_is_not_needed(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: torch.func.grad(lambda q: db.attend(q).output.sum())(QUERIES)
        leaf = QUERIES.clone().requires_grad_()
        answer = db.attend(leaf).output
        assert torch.autograd.grad(answer.sum(), leaf, retain_graph=True)[0].shape == QUERIES.shape
        answer.sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        assert len(answer) == len(QUERIES)
