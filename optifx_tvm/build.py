"""Compile a model: import, optimise, generate code, link."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.support import cc, nvcc
from tvm.target import Target

from optifx_tvm import __version__, artifact, config
from optifx_tvm.artifact import ModelInfo, TensorInfo
from optifx_tvm.errors import ModelError, OptionError, TargetError
from optifx_tvm.frontend import import_model
from optifx_tvm.graph import DTYPES
from optifx_tvm.partition import PLANNERS, Planner
from optifx_tvm.passes.afusion import PLAN_ATTR
from optifx_tvm.pipelines import pipeline
from optifx_tvm.progress import Listener, bar, listening, report
from optifx_tvm.records import Database
from optifx_tvm.runtime import CompiledModel, ScratchFolder
from optifx_tvm.target import host_architecture, is_cuda, resolve_target

_STAGES = ("import", "optimise", "generate code", "link")


def compile(
    model: Any,
    target: str | dict[str, object] | Target | None = None,
    *,
    dtype: str | None = None,
    input_shapes: str | Mapping[str, Sequence[int]] | None = None,
    planner: str | Planner = "search",
    database: Database | None = None,
    progress: bool | Listener = False,
) -> CompiledModel:
    """Compile ``model`` for ``target``.

    ``model``: what ``import_model`` takes (a path, a ``torch`` program, a Relax module,
    ``"zoo:NAME"``). ``target``: see ``resolve_target``; by default the GPU found, else this CPU.
    ``dtype``: "float16" computes in half precision with float32 accumulation. ``input_shapes``
    fixes symbolic sizes. ``planner``: "search", "greedy", "none" or a callable
    ``ConvGraph -> Partition``. ``database``: tuned tiles. ``progress``: True shows a bar, or a
    callable is told (stage, done, total).

    Raises an OptiFXError where model, target or option are at fault.
    """
    check_options(dtype, planner)
    resolved = resolve_target(target)
    compiler = _linker(resolved)
    if is_cuda(resolved) and tvm.cuda(0).exist:
        _check_nvcc()
    with bar() if progress is True else listening(progress or None):
        module = _stage(0, import_model, model, input_shapes=input_shapes, dtype=dtype)
        passes = pipeline(resolved, dtype=dtype, planner=planner, database=database)
        with pass_context(resolved):
            with resolved:
                lowered = _stage(1, passes, module)
            executable = _stage(2, tvm.compile, lowered, resolved, relax_pipeline=None)
        folder = ScratchFolder()
        library = folder.path / "model.so"
        _stage(3, _link, executable, library, compiler)
    return CompiledModel(library, _describe(lowered, resolved, dtype, planner), folder)


def check_options(dtype: str | None, planner: str | Planner) -> None:
    """Raise OptionError for a dtype or planner that does not exist."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}: supported are {' and '.join(DTYPES)}")
    if isinstance(planner, str) and planner not in PLANNERS:
        raise OptionError(f"unknown planner {planner!r}: supported are {', '.join(PLANNERS)}")


def pass_context(target: Target) -> contextlib.AbstractContextManager[Any]:
    """The current PassContext with what ``target`` needs added; the user's own settings win."""
    if not is_cuda(target):
        return contextlib.nullcontext()
    current = tvm.transform.PassContext.current()
    needed = {
        # One launch for the whole network.
        "relax.backend.use_cuda_graph": True,
        # It merges fp16 and fp32 buffers, which the tensor-core intrinsics refuse.
        "tirx.disable_storage_rewrite": True,
    }
    return tvm.transform.PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=list(current.disabled_pass),
        instruments=list(current.instruments),
        config={**needed, **current.config},
    )


def _stage(index: int, function: Any, *args: Any, **kwargs: Any) -> Any:
    report("compile", index, len(_STAGES))
    report(_STAGES[index], 0, 1)
    result = function(*args, **kwargs)
    report(_STAGES[index], 1, 1)
    report("compile", index + 1, len(_STAGES))
    return result


def _link(executable: Any, library: Path, compiler: str) -> None:
    try:
        executable.export_library(str(library), cc=compiler)
    except (OSError, RuntimeError) as error:
        raise TargetError(f"{compiler} can't link the model: {error}") from error


def _linker(target: Target) -> str:
    """The compiler that links for the target's processor; raises TargetError without one."""
    wanted, here = host_architecture(target), artifact.machine_architecture()
    if wanted == here:
        found = cc.get_cc()
        if found is None:
            raise TargetError("no C++ compiler found to link with: install g++, or set CXX")
        return found
    name = f"{wanted}-linux-gnu-g++"
    found = shutil.which(name)
    if found is None:
        raise TargetError(
            f"the target has an {wanted} processor, and {name}, which links for it, is not here: "
            f"install it (Debian: g++-{wanted.replace('_', '-')}-linux-gnu)"
        )
    return found


def _check_nvcc() -> None:
    if config.cuda_compile_mode() != "nvcc":
        return
    try:
        nvcc.find_cuda_path()
    except RuntimeError as error:
        raise TargetError("no CUDA toolkit found: put its nvcc on PATH or set CUDA_PATH") from error


def _describe(
    module: tvm.IRModule, target: Target, dtype: str | None, planner: str | Planner
) -> ModelInfo:
    main = module["main"]
    plan = (module.attrs or {}).get(PLAN_ATTR)
    return ModelInfo(
        inputs=tuple(_tensor_info(str(p.name), p.ty) for p in main.params),
        outputs=tuple(_tensor_info(f"output_{i}", ty) for i, ty in enumerate(_leaves(main.ret_ty))),
        target=str(target),
        target_kind=target.kind.name,
        host_architecture=host_architecture(target),
        dtype=dtype,
        planner=planner if isinstance(planner, str) else getattr(planner, "__name__", "custom"),
        optifx_version=__version__,
        tvm_version=tvm.__version__,
        plan=None if plan is None else json.loads(str(plan)),
    )


def _leaves(ty: Any) -> list[relax.TensorType]:
    if isinstance(ty, relax.TensorType):
        return [ty]
    return [leaf for field in ty.fields for leaf in _leaves(field)]


def _tensor_info(name: str, ty: relax.TensorType) -> TensorInfo:
    shape = list(ty.shape) if isinstance(ty.shape, relax.ShapeExpr) else []
    if len(shape) != ty.ndim or not all(isinstance(n, tvm.tirx.IntImm) for n in shape):
        raise ModelError(
            f"{name} has the dynamic shape {ty.shape}: fix it with "
            f'input_shapes={{"{name}": (...)}} or --input-shapes "{name}:[...]"'
        )
    return TensorInfo(name, tuple(n.value for n in shape), str(ty.dtype))
