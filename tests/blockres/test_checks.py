"""Every refusal names what came, the rule that it breaks, and what would work."""

import pytest
import torch
from torch import distributed
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from blockres import functional

D = 8


def rows(*lead, width=D, **options):
    return torch.randn(*(lead or (3,)), width, **options)


def aggregate(sources, query=None, **options):
    return functional.attn_res(sources, torch.randn(D) if query is None else query, **options)


def phase_1(sources=None, queries=None, key_weights=None, **options):
    queries = torch.randn(2, D) if queries is None else queries
    return functional.attn_res_inter([rows()] if sources is None else sources, queries, key_weights, **options)


def phase_2(output=None, lse=None, partial=None, query=None, **options):
    output = rows() if output is None else output
    lse = torch.randn(3) if lse is None else lse
    return functional.attn_res_merge(
        output, lse, rows() if partial is None else partial, torch.randn(D) if query is None else query, **options
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: aggregate([]), "at least one source"),
        (lambda: aggregate(rows(0, 3)), "at least one source"),
        (lambda: aggregate(torch.randn(D)), r"stacked as \[N, \.\.\., D\], got shape \(8,\); pass a single source as"),
        (lambda: aggregate([torch.tensor(1.0)]), "must have a last dimension D"),
        (lambda: aggregate([rows(), rows(4)]), r"source 1 has shape \(4, 8\), source 0 has \(3, 8\)"),
        (
            lambda: aggregate([rows(), rows(), rows().double()]),
            "source 2 has dtype torch.float64, source 0 has torch.fl",
        ),
        (lambda: aggregate([rows(), rows(device="meta")]), "source 1 has device meta, source 0 has cpu"),
        (lambda: aggregate([rows(width=16)[..., ::2]]), r"must be contiguous, got shape \(3, 8\).*\.contiguous\(\)"),
        (lambda: aggregate([rows(2, 3, 4, 5).permute(2, 0, 1, 3, 4)[:, :, ::2]]), "reduce to two strides"),
        (lambda: aggregate([rows(2, 3, 4)[:, ::2], rows(2, 4, 4)[:, :2, :]]), "cut at one place"),
        (lambda: aggregate([rows(width=0)], torch.randn(0)), "D = 0; D must be between 1 and 16384"),
        (lambda: aggregate([rows(width=16385)], torch.randn(16385)), "D = 16385"),
        (lambda: aggregate([rows()], torch.randn(9)), r"query must have shape \(8,\), got \(9,\)"),
        (lambda: aggregate([rows()], torch.randn(1, D)), r"query must have shape \(8,\), got \(1, 8\)"),
        (lambda: aggregate([rows()], torch.randn(D, device="meta")), "query is on meta, the rows are on cpu"),
        (lambda: aggregate([rows()], key_weight=torch.randn(1)), r"key_weight must have shape \(8,\), got \(1,\)"),
        (lambda: aggregate([rows()], norm_weight=torch.randn(1)), r"norm_weight must have shape \(8,\), got \(1,\)"),
        (lambda: aggregate([rows()], norm_eps=1e-6), "norm_eps = 1e-06 without norm_weight"),
        (lambda: aggregate([rows()], eps=0.0), "eps must be a positive number, got 0.0"),
        (lambda: aggregate([rows()], eps=float("nan")), "eps must be a positive number, got nan"),
        (lambda: aggregate([rows()], norm_weight=torch.ones(D), norm_eps=-1.0), "norm_eps must be a positive number"),
        (lambda: aggregate([rows()], scale=float("inf")), "scale must be a finite number, got inf"),
        (lambda: phase_1(queries=torch.randn(D)), r"queries must be \[S, D\] with S at least 1, got shape \(8,\)"),
        (lambda: phase_1(queries=torch.randn(0, D)), r"with S at least 1, got shape \(0, 8\)"),
        (lambda: phase_1(queries=torch.randn(2, 9)), r"queries must have shape \(2, 8\), got \(2, 9\)"),
        (lambda: phase_1(key_weights=torch.randn(3, D)), r"key_weights must have shape \(2, 8\), got \(3, 8\)"),
        (lambda: phase_1(key_weights=torch.randn(D)), r"key_weights must have shape \(2, 8\), got \(8,\)"),
        (lambda: phase_1(sources=[rows(), rows(4)]), "source 1 has shape"),
        (lambda: phase_2(partial=rows(4)), r"partial has shape \(4, 8\), output has \(3, 8\)"),
        (lambda: phase_2(update=rows(4)), r"update has shape \(4, 8\), output has \(3, 8\)"),
        (lambda: phase_2(update=rows(device="meta")), "update is on meta"),
        (lambda: phase_2(lse=torch.randn(4)), r"lse must have shape \(3,\), got \(4,\)"),
        (lambda: phase_2(lse=torch.randn(3, 1)), r"lse must have shape \(3,\), got \(3, 1\)"),
        (lambda: phase_2(query=torch.randn(2, D)), r"query must have shape \(8,\)"),
        (lambda: phase_2(partial=rows(width=16)[..., ::2]), "the last dimension of partial must be contiguous"),
        (lambda: phase_2(norm_eps=1.0), "without norm_weight"),
    ],
)
def test_values(act, message):
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: aggregate(None), "a sequence of tensors.*got NoneType"),
        (lambda: aggregate(iter([rows()])), "a sequence of tensors"),
        (lambda: aggregate([rows(), None]), "source 1 must be a tensor, got NoneType"),
        (
            lambda: aggregate([rows().long()]),
            "source 0 must be one of float32, bfloat16, float16, float64, got torch.int64",
        ),
        (lambda: aggregate([rows().to(torch.complex64)]), "got torch.complex64"),
        (lambda: aggregate([rows().to(torch.float8_e4m3fn)]), "got torch.float8_e4m3fn"),
        (lambda: aggregate([rows().to_sparse()]), r"dense tensor, got layout torch.sparse_coo; call .to_dense\(\)"),
        (lambda: aggregate([rows().to_mkldnn()]), "dense tensor, got layout torch._mkldnn"),
        (lambda: aggregate([torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)]), "dense tensor"),
        (lambda: aggregate([rows()], [1.0] * D), "query must be a tensor, got list"),
        (lambda: aggregate([rows()], torch.ones(D, dtype=torch.int32)), "query must be one of"),
        (lambda: aggregate([rows()], out_dtype=torch.int8), "out_dtype must be one of float32, .*got torch.int8"),
        (lambda: phase_1(queries=None, key_weights=1.0), "key_weights must be a tensor, got float"),
        (lambda: phase_2(lse=0.5), "lse must be a tensor, got float"),
        (lambda: phase_2(update=1), "update must be a tensor, got int"),
        (lambda: functional.attn_res([rows()], None), "query must be a tensor, got NoneType"),
        (lambda: functional.attn_res_merge(rows(), None, rows(), torch.ones(D)), "lse must be a tensor, got NoneType"),
        (lambda: functional.attn_res_merge(rows(), torch.ones(3), None, torch.ones(D)), "partial must be a tensor"),
        (lambda: functional.attn_res_step(rows(2, 3), None), "query must be a tensor, got NoneType"),
        (lambda: aggregate([rows()], eps="x"), "eps must be a Python number, got a str"),
        (lambda: aggregate([rows()], eps=torch.tensor(1e-6)), "eps must be a Python number, got a Tensor"),
        (lambda: aggregate([rows()], scale=None), "scale must be a Python number, got None"),
    ],
)
def test_types(act, message):
    with pytest.raises(TypeError, match=message):
        act()


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_distributed_tensors(mesh):
    source, query = (distribute_tensor(x, mesh, [Replicate()]) for x in (rows(), torch.randn(D)))
    with pytest.raises(TypeError, match=r"source 1 is a DTensor.*\.to_local\(\).*\.full_tensor\(\)"):
        aggregate([rows(), source])
    with pytest.raises(TypeError, match="query is a DTensor"):
        aggregate([rows()], query)
    assert aggregate([source.to_local()], query.to_local()).shape == (3, D)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.vmap(f)(rows(4, 3)),
        lambda f: torch.func.jvp(f, (rows(),), (rows(),)),
        lambda f: torch.func.grad(lambda x: f(x).sum())(rows()),
        lambda f: torch.func.jacfwd(f)(rows()),
    ],
)
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: aggregate([x, x], torch.ones(D)),
        lambda x: functional.attn_res_inter_chained([x], torch.ones(2, D))[0][0],
        lambda x: functional.attn_res_merge(x, torch.ones(3), x, torch.ones(D))[0],
    ],
)
def test_function_transforms(transform, operation):
    with pytest.raises(NotImplementedError, match=r"torch\.func transform.*blockres\.reference"):
        transform(operation)


def test_forward_mode():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="query came through forward mode"):
        aggregate([rows()], forward_ad.make_dual(torch.randn(D), torch.randn(D)))
