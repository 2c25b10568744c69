"""``import_model``: whatever a person has, as a Relax module whose entry is ``main``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from optifx_tvm import torch_import
from optifx_tvm.errors import ModelError, OptionError
from optifx_tvm.graph import DTYPE_ATTR, DTYPES

if TYPE_CHECKING:
    import onnx

Shapes = Mapping[str, Sequence[int]]

_KINDS = "an .onnx file, a .pt2 file (torch.export), a Relax module saved as .json, or zoo:NAME"
_ZOO = "zoo:"
_MOST_ELEMENTS = 2**31 - 1  # 8 GB in float32; far beyond it sizes overflow


def import_model(
    source: str | PathLike[str] | tvm.IRModule | Any,
    input_shapes: str | Shapes | None = None,
    dtype: str | None = None,
) -> tvm.IRModule:
    """Imports a model, parameters as constants; the result is new unless ``source`` is a module.

    ``source``: a path to an ``.onnx`` file (or an ``onnx.ModelProto``), to a ``.pt2`` file (or a
    torch ``ExportedProgram``), to a Relax module saved with ``tvm.ir.save_json`` (``.json``), the
    name of a zoo network (``"zoo:resnet50"``), or a Relax ``IRModule``, which is never changed.

    ``input_shapes``: ``{"data": (1, 3, 224, 224)}`` or ``"data:[1,3,224,224] other:[1,8]"``; needed
    where the model leaves dimensions open, and allowed elsewhere.

    ``dtype``: "float32" or "float16", what the model is to compute in. It is noted as the module's
    attribute "optifx.dtype" and carried out by ``CanonicalizeConv``, which accumulates in float32:
    the imported module still has the model's own types.

    Raises ``ModelError`` (missing, truncated, not a model, unsupported operator, open dimensions,
    unknown input names) or ``OptionError`` (``dtype``, unreadable ``input_shapes``).
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; supported are 'float32' and 'float16'")
    module = _imported(source, parse_input_shapes(input_shapes))
    _check_extents(module)
    return module if dtype is None else module.with_attr(DTYPE_ATTR, dtype)


def _imported(source: Any, shapes: Shapes) -> tvm.IRModule:
    if isinstance(source, tvm.IRModule):
        return _specialised(source, shapes, "the module")
    if torch_import.is_exported_program(source):
        return _specialised(torch_import.from_torch(source), shapes, "the torch program")
    if isinstance(source, str) and source.startswith(_ZOO):
        return _from_zoo(source.removeprefix(_ZOO), shapes)
    if isinstance(source, str | PathLike):
        return _from_file(Path(source), shapes)
    if type(source).__name__ == "ModelProto":
        return _from_onnx(source, shapes)
    raise ModelError(f"can't import a {type(source).__name__}; supported are {_KINDS}")


def parse_input_shapes(text: str | Shapes | None) -> dict[str, tuple[int, ...]]:
    """``"data:[1,3,224,224] other:[1,8]"`` (or a mapping) as a dictionary of shapes."""
    if text is None:
        return {}
    shapes: dict[str, tuple[int, ...]]
    if not isinstance(text, str):
        try:
            shapes = {name: tuple(map(operator.index, shape)) for name, shape in text.items()}
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"can't read input shapes {text!r}; give a mapping such as "
                '{"data": (1, 3, 224, 224)}'
            ) from error
    else:
        item = re.compile(r"\s*([^\s\[\]]+?)\s*:\s*\[([\d\s,]*)\]\s*,?")
        shapes, position = {}, 0
        while position < len(text.rstrip()):
            match = item.match(text, position)
            if match is None:
                raise OptionError(
                    f"can't read input shapes {text!r}; write them as 'data:[1,3,224,224]', "
                    "several with a space between"
                )
            if match[1] in shapes:
                raise OptionError(f"input shapes {text!r} name '{match[1]}' twice")
            extents = [part for part in match[2].replace(",", " ").split() if part]
            shapes[match[1]] = tuple(int(extent) for extent in extents)
            position = match.end()
    for name, shape in shapes.items():
        if any(extent <= 0 for extent in shape):
            raise OptionError(f"shape {list(shape)} of input '{name}' has an extent below 1")
        if math.prod(shape) > _MOST_ELEMENTS:
            raise OptionError(f"shape {list(shape)} of input '{name}' has over 2^31 elements")
    return shapes


def _from_file(path: Path, shapes: Shapes) -> tvm.IRModule:
    suffix = path.suffix.lower()
    try:
        there = path.exists()
    except (OSError, ValueError) as error:  # no permission, a name too long or with a zero byte
        raise ModelError(f"can't read {str(path)!r}: {error}") from error
    if not there:
        raise ModelError(f"no such file: '{path}'; supported are {_KINDS}")
    if not path.is_file():
        raise ModelError(f"'{path}' is not a file; supported are {_KINDS}")
    if suffix == ".onnx":
        from optifx_tvm import onnx_import

        return _from_onnx(onnx_import.load(path), shapes)
    if suffix == ".pt2":
        return _specialised(torch_import.from_torch(torch_import.load(path)), shapes, f"'{path}'")
    if suffix == ".json":
        return _specialised(_from_json(path), shapes, f"'{path}'")
    raise ModelError(f"'{path}' is of an unknown kind; supported are {_KINDS}")


def _from_json(path: Path) -> tvm.IRModule:
    try:
        module = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, OSError) as error:
        raise ModelError(f"'{path}' is no module saved with tvm.ir.save_json") from error
    if not isinstance(module, tvm.IRModule):
        raise ModelError(f"'{path}' holds a {type(module).__name__}; a Relax module is needed")
    return module


def _from_zoo(name: str, shapes: Shapes) -> tvm.IRModule:
    from optifx_tvm import zoo

    unknown = [key for key in shapes if key != "data"]
    if unknown:
        raise ModelError(f"zoo:{name} has no input '{unknown[0]}'; its input is 'data'")
    return zoo.build(name, input_shape=shapes.get("data"))


def _from_onnx(model: onnx.ModelProto, shapes: Shapes) -> tvm.IRModule:
    from optifx_tvm import onnx_import

    inputs = onnx_import.graph_inputs(model)
    given = dict(shapes)
    for name in inputs:
        # The module's inputs are named with "_" for ".": both spellings are understood.
        if name not in given and name.replace(".", "_") in given:
            given[name] = given.pop(name.replace(".", "_"))
    _check_names(given, list(inputs), "the ONNX graph")
    static: dict[str, tuple[int, ...]] = {}
    for name, declared in inputs.items():
        shape = tuple(given.get(name, ()))
        if name not in given:
            shape = tuple(extent for extent in declared if isinstance(extent, int))
            if len(shape) < len(declared):
                raise _open_dimensions(name, declared)
        elif len(shape) != len(declared):
            raise ModelError(
                f"input '{name}' has {len(declared)} dimensions {list(declared)}; "
                f"the shape given is {list(shape)}"
            )
        static[name] = shape
    return onnx_import.from_onnx(model, static)


def _open_dimensions(name: str, declared: Sequence[object]) -> ModelError:
    example = ",".join(str(d) if isinstance(d, int) else "1" for d in declared)
    shown = ", ".join(str(d) for d in declared)
    return ModelError(
        f"input '{name}' has open dimensions ({shown}); "
        f'give its shape, as in --input-shapes "{name}:[{example}]"'
    )


def _check_names(shapes: Shapes, names: Sequence[str], what: str) -> None:
    for name in shapes:
        if name not in names:
            known = ", ".join(f"'{n}'" for n in names) or "none"
            raise ModelError(f"{what} has no input '{name}'; its inputs are {known}")


def _specialised(module: tvm.IRModule, shapes: Shapes, what: str) -> tvm.IRModule:
    """``module`` with the symbolic dimensions of its inputs bound to those of ``shapes``."""
    main: Any = _main_function(module)
    if main is None:
        raise ModelError(f"{what} has no Relax function 'main'")
    parameters = {parameter.name: parameter for parameter in main.params}
    _check_names(shapes, list(parameters), what)
    bindings: dict[tvm.tirx.Var, int] = {}
    for name, parameter in parameters.items():
        shape: Any = getattr(parameter.ty, "shape", None)
        if not isinstance(shape, relax.ShapeExpr):
            continue
        declared = list(shape.values)
        symbols = [str(d) if isinstance(d, tvm.tirx.Var) else int(d) for d in declared]
        given = tuple(shapes.get(name, ()))
        if name not in shapes:
            if any(isinstance(d, tvm.tirx.Var) and d not in bindings for d in declared):
                raise _open_dimensions(name, symbols)
            continue
        if len(given) != len(declared):
            raise ModelError(
                f"input '{name}' has {len(declared)} dimensions {symbols}; "
                f"the shape given is {list(given)}"
            )
        for extent, dim, symbol in zip(given, declared, symbols, strict=True):
            fixed = bindings.get(dim) if isinstance(dim, tvm.tirx.Var) else int(dim)
            if fixed is not None and fixed != extent:
                raise ModelError(
                    f"dimension {symbol} of input '{name}' is {fixed}; "
                    f"the shape given is {list(given)}"
                )
            if isinstance(dim, tvm.tirx.Var):
                bindings[dim] = extent
    if not bindings:
        return module
    return relax.transform.BindSymbolicVars(bindings, "main")(module)


def _check_extents(module: tvm.IRModule) -> None:
    """Raises ModelError where an intermediate result of ``main`` has no elements: the kernel of a
    convolution or pooling that is larger than its image, which TVM lets pass."""
    main = _main_function(module)
    if main is None or not isinstance(main.body, relax.SeqExpr):
        return
    for block in main.body.blocks:
        for binding in block.bindings:
            shape: Any = getattr(binding.var.ty, "shape", None)
            extents = list(shape.values) if isinstance(shape, relax.ShapeExpr) else []
            if any(isinstance(extent, tvm.tirx.IntImm) and extent.value < 1 for extent in extents):
                call = binding.value
                what = call.op.name if isinstance(call, relax.Call) else "a result"
                raise ModelError(
                    f"{what} '{binding.var.name}' has the shape {[int(e) for e in extents]}: "
                    "the input is too small for this model, give a larger one"
                )


def _main_function(module: tvm.IRModule) -> relax.Function | None:
    for var, function in module.functions_items():
        if var.name_hint == "main" and isinstance(function, relax.Function):
            return function
    return None
