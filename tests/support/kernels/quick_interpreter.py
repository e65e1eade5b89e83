"""Replaces slow parts of Triton's interpreter, for tests. The results are the same."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("fp16", "bf16", "fp32", "fp64"), (-math.inf, math.inf)),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}


def install() -> None:
    """Replaces parts of the interpreter."""
    _remember_builtins()
    _remember_types()
    _combine_alike_at_once()


def _remember_builtins() -> None:
    """Makes the interpreter replace the functions of `tl` once per launch, by functions that are
    made once. Without this it searches for them at every launch and every call of a kernel's own
    function, which takes a third of its time."""
    replaced: dict[object, list[tuple[str, object]]] = {}
    active = SimpleNamespace()  # an attribute for each package whose functions are replaced now

    def interpreted(member: Any) -> object:
        def call(*args: Any, _semantic: object = None, **kwargs: Any) -> Any:
            return member(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        mark = f"package_{id(package)}"
        if hasattr(active, mark):
            return
        scope.set_attr(active, mark, True)  # the scope also takes it back
        if package not in replaced:
            members = inspect.getmembers(package)
            replaced[package] = [
                (name, interpreted(each)) for name, each in members if tl.core.is_builtin(each)
            ]
        for name, member in replaced[package]:
            scope.set_attr(package, name, member)

    patch_language = interpreter._patch_lang

    @cache
    def marks_of(function: Any) -> list[str]:
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [f"language_{id(each)}" for each in modules if each in (tl, tl.core)]

    def patch_lang(function: Any) -> Any:
        """A kernel's own functions find the modules as the launch has left them."""
        if all(hasattr(active, mark) for mark in marks_of(function)):
            return interpreter._LangPatchScope()
        scope = patch_language(function)
        for mark in marks_of(function):
            scope.set_attr(active, mark, True)
        return scope

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
    # This one makes a table of all types at each call.
    of_type, of_number = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def numpy_type(dtype: Any) -> Any:
        return of_type(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)

    interpreter._get_np_dtype = numpy_type


def _remember_types() -> None:
    """Makes the interpreter compute the properties of a shape once, and not for every value.

    It also leaves out the interpreter's search for overflows, which it makes in most operations on
    integers and whose result it drops: without the option `debug` it asserts nothing.
    """
    core: Any = tl.core
    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    make_block_type, known = core.block_type.__init__, dict[object, dict[str, Any]]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty, sizes) if type(element_ty) is core.dtype else None
        if key in known:
            self.__dict__.update(known[key])
            return
        make_block_type(self, element_ty, shape)
        self.kinds, self.of_tensor = {}, shape_of(sizes)
        if key is not None:
            known[key] = dict(self.__dict__)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([*map(core.constexpr, sizes)])

    of_number = shape_of(())

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else of_number

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        if type(element_ty) is not core.dtype:
            return core.block_type(element_ty, self.shape)
        kind = self.kinds.get(element_ty.name)
        if kind is None:
            kind = self.kinds[element_ty.name] = core.block_type(element_ty, self.shape)
        return kind

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.block_type.with_element_ty = with_element_ty


def _combine_alike_at_once() -> None:
    """Leaves out the search for a common type and shape if two values have the same, and makes
    blocks of a number directly."""
    core: Any = tl.core
    semantic: Any = interpreter.interpreter_semantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    equal = core.dtype.__eq__

    def filled(number: Any, block: Any) -> Any:
        kind = block.with_element_ty(number.type)
        return core.tensor(semantic.builder.create_splat(kind, number.handle), kind)

    def broadcast_value(lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if not one.is_block():
            return (filled(lhs, other), rhs) if other.is_block() else (lhs, rhs)
        if not other.is_block():
            return lhs, filled(rhs, one)
        if one.shape.values == other.shape.values:
            return lhs, rhs
        return broadcast(lhs, rhs)

    def fits(number: Any, kind: Any) -> bool:
        """Returns True if the number becomes one of the other value's type."""
        if type(kind) is not core.dtype or kind.name not in _BOUNDS:
            return False
        is_number = type(number) is int or (type(number) is float and kind.is_floating())
        least, most = _BOUNDS[kind.name]
        return is_number and bool(least <= number <= most)

    def check_types(lhs: Any, rhs: Any, *args: Any) -> Any:
        if args[2:] not in ((), (True,), (True, False)):  # a quotient may have another type
            return check(lhs, rhs, *args)
        if type(lhs) is not core.tensor:
            if type(rhs) is core.tensor and fits(lhs, rhs.dtype):
                return broadcast_value(semantic.scalar_constant(lhs, rhs.dtype), rhs)
        elif type(rhs) is not core.tensor:
            if fits(rhs, lhs.dtype):
                return broadcast_value(lhs, semantic.scalar_constant(rhs, lhs.dtype))
        elif type(lhs.dtype) is core.dtype and lhs.dtype == rhs.dtype:
            return broadcast_value(lhs, rhs)
        return check(lhs, rhs, *args)

    semantic.broadcast_impl_value = broadcast_value
    semantic.binary_op_type_checking_impl = check_types
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
