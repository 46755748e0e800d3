"""Short names of GPU kernels: the function, and of its template arguments those that say what it computes.

Compilers name kernels by their whole C++ signature, hundreds of characters of namespaces, types and lambdas.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

_MAX_READ = 8192
"""Characters of a name that are read."""
_MAX_NAMED, _MAX_WORDS = 2, 8
"""Template arguments in a short form, and where it must differ from another one."""
_SIGNATURE = re.compile(r"void |[A-Za-z_~][\w:~]*(?:<.*>|\(.*\))|_ZN?\d")
"""How a C++ signature or its mangled form begins; other names are short, or cannot be shortened."""
_LAMBDA = re.compile(r"\{(?:lambda|unnamed)[^{}#]*#?(\d*)\}")
_WORD = re.compile(r"#\d+|(?<!\w)(?:[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*|-?\d+)")
_MANGLED = re.compile(r"L[a-z](n?\d+)E|\d+")
_LENGTH = re.compile(r"\d+")
COMPILED = r"^triton_(poi|red|per|tem|mm|for|spl)_fused|^triton_(poi|red|per)_|^## Call CompiledFxGraph|^Torch-Compiled"
"""Slices and kernels of torch.compile."""
OF_PYTORCH = (
    r"^(aten|prims|torch|autograd|c10d|_c10d_functional)::|^nn\.Module: |^ProfilerStep#|^torch/|"
    r"at::native|at::cuda|c10::|" + COMPILED
)
"""Operators, functions and kernels of PyTorch; with nsys and without `emit_nvtx` only kernels show it."""
_FRAME = re.compile(r"^(.*)\((\d+)\): (.*)$")
# What wraps the function that says what is computed, and what is the same in all kernels of a kind.
_NOISE = re.compile(
    r"gpu_kernel_impl\w*|(?:Unary|Binary|Ternary|Pointwise)Op\w*Functor|[AB]?(?:Unary|Binary)Functor|opmath_\w+|func_wrapper_t|ReduceOp|Array|array|TensorIterator\w*|TrivialOffsetCalculator|"
    r"OffsetCalculator|LoadWith\w*|StoreWith\w*|TensorListMetadata|TensorListScalarListMetadata|"
    r"FusedOptimizerTensorListMetadata|RestrictPtrTraits|DefaultPtrTraits|operator|const|unsigned|signed|long|int|char|"
    r"short|bool|float|double|void|true|false|BFloat16|Half|half|__half|__half2|__nv_bfloat16|__hip_bfloat16|Float8\w*|"
    r"complex|tuple|Tuple|pair|std|lambda|c10|at|native|int64_t|int32_t|uint\d+_t|size_t|u?l+|enum|struct|class|"
    r"enable_sm\d+\w*|policy_hub|Policy\d+|OpaqueType|CopyFunctor|detail|internal|cuda|hip|memory|policies|type|value"
)


def code_line(frame: str) -> str:
    """A frame of the profiler's Python stack as a place in the code.

    >>> code_line("train.py(20): step")
    'train.py:20 (step)'
    """
    return _FRAME.sub(r"\1:\2 (\3)", frame)


def short(name: str) -> str:
    """Return the short form of a kernel's name; a name that is no C++ signature is returned as it is.

    >>> short("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, int>(int, float)")
    'vectorized_elementwise_kernel<CUDAFunctor_add>'
    >>> short("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'ncclDevKernel_AllGather_RING_LL'
    >>> short("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn")
    'ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn'
    """
    read = _read(name)
    return name if read is None else _with_arguments(read[0], _meaningful(read[1]))


def short_names(names: Collection[str]) -> Mapping[str, str]:
    """Return a short form of each name such that different names stay different.

    Where short forms are the same, the template arguments follow that differ; if these are the same too, the names stay
    as they are.

    >>> list(short_names(["void sum<float, 4>(int)", "void sum<float, 8>(int)", "void mul<float, 4>(int)"]).values())
    ['sum<4>', 'sum<8>', 'mul']
    """
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(short(name), []).append(name)
    forms: dict[str, str] = {}
    for form, group in alike.items():
        forms |= {group[0]: form} if len(group) == 1 else _distinguish(group)
    counts = Counter(forms.values())
    return {name: forms[name] if counts[forms[name]] == 1 else name for name in names}


def _distinguish(names: Sequence[str]) -> Mapping[str, str]:
    """Return a form of each of some names with the same short form: with the template arguments that differ."""
    read = {name: _read(name) or (name, ()) for name in names}
    arguments = [words for _, words in read.values()]
    is_aligned = len(set(map(len, arguments))) == 1
    same = {i for i, words in enumerate(zip(*arguments, strict=False)) if len(set(words)) == 1} if is_aligned else ()
    everywhere = set.intersection(*map(set, arguments))
    forms = {}
    for name, (function, words) in read.items():
        first = _meaningful(words)
        rest = [word for i, word in enumerate(words) if (i not in same if is_aligned else word not in everywhere)]
        forms[name] = _with_arguments(function, list(dict.fromkeys([*first, *rest]))[:_MAX_WORDS])
    return forms


def _with_arguments(function: str, arguments: Sequence[str]) -> str:
    return f"{function}<{', '.join(arguments)}>" if arguments else function


def _meaningful(arguments: Sequence[str]) -> list[str]:
    """Return the first of the template arguments that say what a kernel computes."""
    names = (word for word in dict.fromkeys(arguments) if not _NOISE.fullmatch(word) and not _is_number(word))
    return list(itertools.islice(names, _MAX_NAMED))


def _is_number(word: str) -> bool:
    return word.lstrip("-#").isdigit()


@functools.lru_cache(2048)
def _read(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the function that a name states, and the words of its template arguments; None if it is no signature."""
    text = name[:_MAX_READ]
    if not _SIGNATURE.match(text) or "…" in text:
        return None
    function, arguments = _parse_mangled(text) if text.startswith("_Z") else _signature(text)
    return (function, tuple(arguments)) if function else None


def _signature(name: str) -> tuple[str, list[str]]:
    """Return the function of a C++ signature, and identifiers and numbers of its template arguments in their order.

    The number of a lambda is one of them: "#3".
    """
    text = _LAMBDA.sub(r" #\1 ", name.removeprefix("void ").replace("(anonymous namespace)::", ""))
    path, templates = "", ""
    for part, depth in _parts(text):
        if depth == 0:
            path += part
        else:
            templates += part
    function = path.strip().rpartition(" ")[2].rpartition("::")[2]
    return function, [word.rpartition("::")[2] for word in _WORD.findall(templates)]


def _parts(text: str) -> Iterator[tuple[str, int]]:
    """Yield the parts of a signature outside of parameter lists, with the depth of their template arguments.

    It ends at the parameters of the function itself.
    """
    depth, parameters, begin = 0, 0, 0
    for index, character in enumerate(text):
        if character not in "<>()" or (character == ">" and text[index - 1 : index] == "-"):
            continue
        if not parameters:
            yield text[begin:index], depth
        if character == "(":
            if depth == 0 and not parameters and not text.endswith("operator", 0, index):
                return
            parameters += 1
        elif character == ")":
            parameters = max(parameters - 1, 0)
        elif not parameters:
            depth = max(depth + (1 if character == "<" else -1), 0)
            yield " ", depth if character == "<" else depth + 1
        begin = index + 1
    if not parameters:
        yield text[begin:], depth


def _parse_mangled(name: str) -> tuple[str, list[str]]:
    """Parse a name mangled by the Itanium C++ ABI, where identifiers follow their length, as `_signature` does."""
    path, position = _sequence(name, 3 if name.startswith("_ZN") else 2)
    words: list[str] = []
    while match := _MANGLED.search(name, position):
        if match[1]:
            words.append(match[1].replace("n", "-"))
            position = match.end()
        else:
            listed, position = _sequence(name, match.start())
            words += [word for word in listed[-1:] if len(word) > 1 and word.isidentifier()]
    return path[-1] if path else "", words


def _sequence(name: str, position: int) -> tuple[list[str], int]:
    """Return the identifiers that stand one after the other, each after its length, and where they end."""
    path = []
    while match := _LENGTH.match(name, position):
        end = match.end() + int(match[0][:4])
        path.append(name[match.end() : end])
        position = end
    return path, position
