"""Every answer that is one small step away from a right one, and what the judge says about it.

`python tests/audit/mutants.py 2.3 4.` lists the mutants of these exercises that pass; most of them
make no difference. Without a key it does so for all of them.
"""

import ast
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from minigrpo.exercises.form import Exercise, compiled, source
from minigrpo.exercises.judge import fault_of, no_function, run, wanted
from minigrpo.exercises.reader import all_exercises

BINARY = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Pow: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.MatMult: (ast.Mult,),
}
COMPARED = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq, ast.Lt, ast.Gt),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
PAIRS = """
    amax amin, max min, minimum maximum, sum mean, any all, log log2, log log10, log log1p,
    exp expm1, softmax log_softmax, std var, tril triu, startswith endswith, strip lstrip,
    strip rstrip, repeat_interleave repeat, cumsum cumprod, zeros_like ones_like, zeros ones,
    clamp_min clamp_max,
    argmax argmin, search match, match fullmatch, search fullmatch, append insert, index rindex,
    find rfind, prod sum, logsumexp amax, isneginf isinf, min sum, max sum
"""
METHODS: dict[str, set[str]] = {}
for one, other in (pair.split() for pair in PAIRS.split(",")):
    METHODS.setdefault(one, set()).add(other)
    METHODS.setdefault(other, set()).add(one)


EITHER = {"transpose", "minimum", "maximum", "isclose", "allclose", "equal", "max", "min"}
"""Calls in which the order of the arguments does not matter."""
CONSTANT = {*"detach item tolist len zeros_like ones_like isneginf dim".split()}
"""Calls that no gradient flows through."""


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of this node; fresh nodes."""
    new = copy.deepcopy(node)

    def with_field(**fields) -> ast.AST:
        other = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    match new:
        case ast.BinOp(left=left, op=op, right=right):
            yield from (with_field(op=kind()) for kind in BINARY.get(type(op), ()))
            if isinstance(op, ast.Sub | ast.Div | ast.FloorDiv | ast.Pow | ast.MatMult | ast.Mod):
                yield with_field(left=right, right=left)
            yield from (left, right)
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            yield from (with_field(ops=[kind()]) for kind in COMPARED.get(type(op), ()))
        case ast.BoolOp(op=op, values=values):
            yield with_field(op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(values)):
                rest = [value for j, value in enumerate(values) if j != i]
                yield rest[0] if len(rest) == 1 else with_field(values=rest)
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) is int:
            yield from (ast.Constant(1 - value), ast.Constant(-value - 1))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float() as value):
            yield from (ast.Constant(value + 1.0), ast.Constant(value * 2 or -1.0))
        case ast.Constant(value=str() as value) if value:
            yield ast.Constant("")
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Attribute):
                yield func.value  # x.f(...) becomes x
                for name in sorted(METHODS.get(func.attr, ())):
                    yield with_field(func=ast.Attribute(func.value, name, func.ctx))
            if len(args) == 1 and not keywords:
                yield args[0]  # f(x) becomes x
            for i in range(len(keywords)):
                yield with_field(keywords=keywords[:i] + keywords[i + 1 :])
            for i in range(len(args) - 1 if ast.unparse(func).split(".")[-1] not in EITHER else 0):
                swapped = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
                yield with_field(args=swapped)
            if isinstance(func, ast.Attribute) and args:
                yield with_field(args=args[:-1])
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield with_field(lower=None)
            else:
                yield with_field(lower=ast.Constant(1))
            if upper is not None:
                yield with_field(upper=None)
            else:
                yield with_field(upper=ast.Constant(-1))
            for bound, name in ((lower, "lower"), (upper, "upper")):
                if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                    for op in (ast.Add(), ast.Sub()):
                        yield with_field(**{name: ast.BinOp(bound, op, ast.Constant(1))})
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.comprehension(ifs=[_, *_]):
            yield with_field(ifs=[])
        case ast.Subscript(value=value, ctx=ast.Load()):
            yield value
        case ast.Break() | ast.Continue():
            yield ast.Pass()


def prepared(source: str) -> tuple[ast.Module, ast.FunctionDef]:
    """The code, and its last function without docstring, type hints and lines without effect."""
    tree = ast.parse(source)
    function = next(node for node in reversed(tree.body) if isinstance(node, ast.FunctionDef))
    function.returns = None
    function.body = [node for node in function.body if not is_docstring(node)]
    read = None
    while read != (read := {n.id for n in ast.walk(function) if loaded(n)}):
        for parent in ast.walk(function):
            if isinstance(body := getattr(parent, "body", None), list):
                parent.body = [node for node in body if not is_unread(node, read)]
    return tree, function


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def loaded(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def is_unread(node: ast.AST, read: set[str]) -> bool:
    """Whether it binds names that nobody reads."""
    if not isinstance(node, ast.Assign):
        return False
    names = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    plain = all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    return plain and not names & read


def with_graph(function: ast.FunctionDef, names: set[str]) -> set[str]:
    """The names that hold what depends on these."""
    for node in ast.walk(function):  # twice would be safer, but no answer goes back
        if isinstance(node, ast.Assign):
            for target in node.targets:
                tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts) if tuples else [(target, node.value)]
                for one, of in pairs:
                    if depends(of, names):
                        names = names | {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}
    return names


def depends(node: ast.AST, names: set[str]) -> bool:
    """Whether a gradient can flow from one of these names through this expression."""
    if isinstance(node, ast.Name):
        return node.id in names and loaded(node)
    if isinstance(node, ast.Compare) or isinstance(node, ast.Attribute) and node.attr == "shape":
        return False
    if isinstance(node, ast.Call):
        if called(node) in CONSTANT:
            return False
    return any(depends(child, names) for child in ast.iter_child_nodes(node))


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def detached(node: ast.AST) -> ast.AST:
    return ast.Call(ast.Attribute(node, "detach", ast.Load()), [], [])


def mutations(source: str, gradient: set[str]) -> Iterator[ast.Module]:
    """Every first-order mutant of the function that the source defines last."""
    tree, function = prepared(source)
    graph = with_graph(function, gradient)
    cuts = (n for n in ast.walk(function) if isinstance(n, ast.Call) and called(n) == "detach")
    constant = {id(inner) for cut in cuts for inner in ast.walk(cut)}  # once is enough
    for parent in ast.walk(function):
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.operand, ast.Constant):
            continue
        for field, value in ast.iter_fields(parent):
            places = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for at, node in places:
                if not isinstance(node, ast.AST) or isinstance(node, ast.arguments):
                    continue
                others = list(replacements(node))
                flows = isinstance(node, ast.Call | ast.BinOp | ast.Name) and depends(node, graph)
                if flows and id(node) not in constant:
                    others.append(detached(node))
                if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.If | ast.For):
                    others.append(ast.Pass())
                for other in others:
                    with_node(parent, field, at, other)
                    yield tree
                with_node(parent, field, at, node)


def with_node(parent: ast.AST, field: str, at: int | None, node: ast.AST) -> None:
    if at is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[at] = node


def mutants(exercise: Exercise, function: Callable) -> dict[str, Callable]:
    """The mutants of a right way by the lines that they have and it has not."""
    text = source(function)
    plain = ast.unparse(prepared(text)[0]).splitlines()
    made = {}
    for tree in mutations(text, set(exercise.gradient.split())):
        text = ast.unparse(ast.fix_missing_locations(tree))
        lines = text.splitlines()
        new = [line.strip() for line in lines if line not in plain]
        old = [line.strip() for line in plain if line not in lines]
        name = "; ".join(new) if new != ["pass"] and new else "without " + "; ".join(old)
        if lines != plain and name not in made:
            names = dict(function.__globals__)
            with suppress(SyntaxError):
                made[name] = compiled(text + "\n", function.__name__, names, f"<mutant {name}>")
    return made


def passes(exercise: Exercise, function: Callable) -> bool:
    """Whether it is right in all cases, corners left out; it stops at the first fault."""
    for case, right in zip(exercise.tried, wanted(exercise, exercise.reference), strict=True):
        if not case.remark:
            outcome = run(exercise, function, case, 1.0)
            if outcome.changed or fault_of(exercise, case, right, outcome):
                return False
    return no_function(function) is None


def survivors(exercise: Exercise) -> tuple[int, list[str]]:
    """How many mutants of the solution there are, and the lines of those that pass."""
    made = mutants(exercise, exercise.reference)
    return len(made), [line for line, function in made.items() if passes(exercise, function)]


def main(keys: list[str]) -> None:
    chosen = [e for e in all_exercises() if not keys or e.key.startswith(tuple(keys))]
    for exercise in chosen or sys.exit(f"there is no exercise {' or '.join(keys)}"):
        if not exercise.code:
            start = time.monotonic()
            number, passed = survivors(exercise)
            seconds = time.monotonic() - start
            print(f"{exercise.key}: {len(passed)} of {number} mutants pass, {seconds:.1f} s")
            for line in passed:
                print(f"  `{line}`")


if __name__ == "__main__":
    main(sys.argv[1:])
