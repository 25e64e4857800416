"""Foreign pickles: nothing is called, imported or changed, and a few bytes cost little time and memory."""

import io
import json
import pickle
import pickletools
import struct
import subprocess
import sys
import textwrap
import time
import zipfile
from argparse import Namespace

import pytest
import torch

from dtgpt.data.library_tokenizers.unpickler import MAKERS, StandIn, _Unpickler, read_pickle
from dtgpt.interop.pickles import open_pickle
from dtgpt.util.errors import UserError
from tests.interop.test_interop_foreign import checkpoint

TOUCH = "__import__('pathlib').Path('MARK').touch()"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def names(module: str, name: str) -> dict[str, bytes]:
    return {
        "GLOBAL": f"c{module}\n{name}\n".encode(),
        "STACK_GLOBAL": text(module) + text(name) + b"\x93",
    }


CALLS = {
    "REDUCE": lambda function, argument: function + argument + b"\x85R",
    "NEWOBJ": lambda function, argument: function + argument + b"\x85\x81",
    "NEWOBJ_EX": lambda function, argument: function + argument + b"\x85}\x92",
    "OBJ": lambda function, argument: b"(" + function + argument + b"o",
    "BUILD": lambda function, argument: function + b"}" + text("__call__") + argument + b"sb",
    "BUILD of slots": lambda function, argument: function + b"N}" + text("__init__") + argument + b"s\x86b",
    "twice": lambda function, argument: function + argument + b"\x85R" + argument + b"\x85R",
}
FUNCTIONS = [
    ("builtins", "eval"),
    ("__builtin__", "exec"),
    ("os", "system"),
    ("posix", "system"),
    ("torch.jit", "load"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("naming", ["GLOBAL", "STACK_GLOBAL"])
def test_no_opcode_calls_a_function(tmp_path, monkeypatch, call, function, naming):
    monkeypatch.chdir(tmp_path)
    argument = TOUCH if "s" not in function[1] else "touch MARK"
    program = b"\x80\x02" + CALLS[call](names(*function)[naming], text(argument)) + b"."
    assert isinstance(read_pickle(io.BytesIO(program)), StandIn)
    assert not list(tmp_path.iterdir())


def test_inst_and_modules_that_run_when_they_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text("open('MARK', 'w')")
    for program in (b"(" + text("touch MARK") + b"ios\nsystem\n.", b"cevil\nanything\n.", b"(ievil\nThing\n."):
        assert isinstance(read_pickle(io.BytesIO(program)), StandIn)
    assert [p.name for p in tmp_path.iterdir()] == ["evil.py"] and "evil" not in sys.modules


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_known_names_cannot_be_changed(name):
    """State that a pickle gives to a class or a function would hold for the whole process."""
    module, _, last = name.rpartition(".")
    before = vars(Namespace).copy()
    for state in (b"}", b"N}" + text("__init__") + b"Ns\x86"):
        made = read_pickle(io.BytesIO(names(module, last)["GLOBAL"] + state + b"b."))
        assert isinstance(made, StandIn) and made.state in ({}, (None, {"__init__": None}))
    assert vars(Namespace) == before


def test_plain_values_of_every_protocol():
    value = {
        "a": [1, -5, 1 << 80, 2.5, None, True, False, "\u00e9", b"raw"], "b": {"c": (1, (2, 3), ())},
        ("x", 1): [[]], 3: {},
    }  # fmt: skip
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = read_pickle(io.BytesIO(pickle.dumps(value, protocol)))
        if protocol < 3:  # bytes are written as a call of a codec
            assert isinstance(found["a"].pop(), StandIn)
            assert found == value | {"a": value["a"][:-1]}
        else:
            assert found == value
        same = [[]] * 2
        first, second = read_pickle(io.BytesIO(pickle.dumps(same, protocol)))
        assert first is second


PLAIN = """
    PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE BINUNICODE8 SHORT_BINUNICODE BINBYTES BINBYTES8 SHORT_BINBYTES
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT APPEND APPENDS PUT BINPUT LONG_BINPUT GET BINGET
    LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL INST OBJ PERSID BINPERSID
"""  # steps of the standard library's unpickler that neither import nor call nor hash what a file says


def test_every_opcode_is_known_or_replaced():
    """An opcode that a later Python adds fails here before its step is taken over."""
    ours, theirs = _Unpickler.dispatch, pickle._Unpickler.dispatch
    assert ours.keys() == theirs.keys()
    same = {o.name for o in pickletools.opcodes if ours[ord(o.code)] is theirs[ord(o.code)]}
    assert same == set(PLAIN.split())
    for method in ("find_class", "persistent_load", "_instantiate"):  # which those of names and objects call
        assert getattr(_Unpickler, method) is not getattr(pickle._Unpickler, method)


@pytest.mark.parametrize(
    "program", [b"\x82\x01.", b"\x83\x01\x00.", b"\x96" + struct.pack("<q", 1 << 40), b"\x97.", b"N\x98."]
)
def test_steps_that_plain_pickles_do_not_have_are_refused(program):
    with pytest.raises(ValueError, match="its pickle has a step"):
        read_pickle(io.BytesIO(program))


def test_a_pickle_of_too_many_steps_is_refused(monkeypatch):
    monkeypatch.setattr("dtgpt.data.library_tokenizers.unpickler.MOST_READS", 1000)
    for protocol in (2, 4):
        with pytest.raises(ValueError, match="needs more than 1000 reads"):
            read_pickle(io.BytesIO(pickle.dumps([None] * 2000, protocol)))


DOUBLED = b"]" + b"2\x86" * 40  # of tuples: 2^40 leaves
DOUBLED_LIST = b"](lp0\n" + b"".join(b"](g%dg%dlp%d\n" % (i, i, i + 1) for i in range(40))


def in_archive(path, pickled, compression=zipfile.ZIP_STORED, **entries):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x/data.pkl", pickled)
        for name, content in entries.items():
            archive.writestr(f"x/data/{name[1:]}", content)
    return path


def tensor(offset, size, stride, elements=4, key="0"):
    """A program that makes a tensor of fp32."""

    def number(n):
        return b"\x8a\x09" + n.to_bytes(9, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(elements) + b"tQ"
    rest = number(offset) + numbers(size) + numbers(stride) + b"\x89}"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


def opened(path, program, **entries):
    return open_pickle(in_archive(path, b"\x80\x02}" + text("t") + program + b"s.", **(entries or {"_0": bytes(16)})))[
        "t"
    ]


def test_tensors_lie_in_their_storage(tmp_path):
    path = tmp_path / "x.pt"
    values = {"_0": struct.pack("<4f", 1, 2, 3, 4)}
    assert opened(path, tensor(1, [3], [1]), **values).tolist() == [2, 3, 4]
    assert opened(path, tensor(0, [2, 2], [1, 2]), **values).tolist() == [[1, 3], [2, 4]]  # transposed
    assert opened(path, tensor(0, [2, 1], [2, 7]), **values).tolist() == [[1], [3]]
    assert opened(path, tensor(0, [], []), **values).tolist() == 1
    assert opened(path, tensor(0, [0, 5], [5, 1]), **values).shape == (0, 5)


@pytest.mark.parametrize(("offset", "size", "stride", "elements"), [
    (1, [4], [1], 4), (4, [1], [1], 4), (0, [5], [1], 4), (0, [2, 2], [3, 1], 4), (0, [2], [4], 4), (-1, [2], [1], 4),
    (0, [2], [-1], 4), (0, [-2], [1], 4), (0, [2, 2], [1], 4), (0, [1 << 61, 8], [8, 1], 4), (0, [4], [1], 5),
    (0, [4], [1], -4), (0, [4], [1], 1 << 62), (0, [1] * 65, [1] * 65, 4), (1 << 63, [1], [1], 4)
])  # fmt: skip
def test_tensors_beyond_their_storage_are_refused(tmp_path, offset, size, stride, elements):
    with pytest.raises(UserError, match=r"x.pt cannot be read"):
        opened(tmp_path / "x.pt", tensor(offset, size, stride, elements))


@pytest.mark.parametrize(("size", "stride"), [([48 << 30], [0]), ([3, 2], [1, 1]), ([2, 2], [0, 1]), ([2, 2], [1, 1])])
def test_tensors_whose_elements_share_memory_are_no_tensors(tmp_path, size, stride):
    found = opened(tmp_path / "x.pt", tensor(0, size, stride))
    assert isinstance(found, StandIn) and "share memory" in repr(found)


def test_a_model_of_such_a_tensor_is_refused_in_a_sentence(tmp_path):
    from dtgpt.interop.nanogpt import NanoGPT

    saved = checkpoint()
    saved["model"]["transformer.wte.weight"] = torch.zeros(1).expand(131, 48)
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"wte.weight=<tensor of shape \(131, 48\) whose elements share memory>"):
        NanoGPT(tmp_path / "x.pt")


CHILD = textwrap.dedent(
    """
    import json, resource, sys, time
    from pathlib import Path
    from dtgpt.util.errors import UserError
    from dtgpt.checkpoint.open import open_source
    limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for path in sys.argv[1:]:
        began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            open_source(Path(path))
            said = None
        except UserError as error:
            said = str(error)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps([path, said, time.process_time() - began, after - before]), flush=True)
    """
)


def bombs(folder):
    """Small files, each of which claims much, by name."""
    legacy = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    args = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 8, "bias": True}

    def nanogpt(**changes):
        content = {name: pickle.dumps(value, 2)[2:-1] for name, value in {"model": {}, "model_args": args}.items()}
        content |= changes
        return b"\x80\x02}(" + b"".join(text(name) + value for name, value in content.items()) + b"u."

    def with_layers(value):
        fields = {name: pickle.dumps(n, 2)[2:-1] for name, n in args.items()} | {"n_layer": value}
        return nanogpt(model_args=b"}(" + b"".join(text(n) + v for n, v in fields.items()) + b"u")

    collisions = b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for i in range(100_000))
    found = {
        "deflated": (b"N" * 100_000_000 + b".", zipfile.ZIP_DEFLATED),
        "doubled list": (with_layers(DOUBLED_LIST), zipfile.ZIP_STORED),
        "doubled tuple": (with_layers(DOUBLED), zipfile.ZIP_STORED),
        "doubled key": (nanogpt(model=b"}" + DOUBLED + b"Ns"), zipfile.ZIP_STORED),
        "nested key": (nanogpt(model=b"})" + b"\x85" * 200_000 + b"Ns"), zipfile.ZIP_STORED),
        "nested": (with_layers(b"]" + b"\x85" * 500_000), zipfile.ZIP_STORED),
        "large integer": (with_layers(b"\x8b" + struct.pack("<i", 200_000) + b"\x7f" * 200_000), zipfile.ZIP_STORED),
        "digits": (with_layers(b"I" + b"9" * 100_000 + b"\n"), zipfile.ZIP_STORED),
        "long text": (with_layers(text("x" * 3_000_000)), zipfile.ZIP_STORED),
        "claimed text": (b"\x8d" + struct.pack("<q", 1 << 40) + b".", zipfile.ZIP_STORED),
        "stride 0": (nanogpt(model=b"}" + text("w") + tensor(0, [48 << 30], [0]) + b"s"), zipfile.ZIP_STORED),
        "bytearray": (nanogpt(model=b"}N" + b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85Rs"), zipfile.ZIP_STORED),
        "copies": (nanogpt(model=b"}" + text("x") + b"](" + b"N" * 100_000 + b"lq\x00" + b"ctorch\nSize\nq\x01("
            + b"h\x01h\x00\x85R" * 100_000 + b"ts"), zipfile.ZIP_STORED),
        "colliding keys": (nanogpt(model=b"}(" + collisions + b"u"), zipfile.ZIP_STORED),
    }  # fmt: skip
    for name, (pickled, compression) in found.items():
        yield name, in_archive(folder / f"{name}.pt", pickled, compression, _0=bytes(16))
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    claims = legacy + b"\x80\x02}" + text("x") + storage + b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"NtQs."
    (folder / "claimed storage.pt").write_bytes(claims + pickle.dumps(["0"], 2) + (1 << 40).to_bytes(8, "little"))
    yield "claimed storage", folder / "claimed storage.pt"
    yield "shared dictionaries", shared_dictionaries(folder / "shared")


def shared_dictionaries(root):
    """A Megatron-LM tree of 7 levels, each 100 times the same dictionary: 10^14 names."""
    program = b"}q\x00"
    for level in range(7):
        program += b"}q%c(" % (level + 1) + b"".join(text(f"k{i}") + b"h%c" % level for i in range(100)) + b"u"
    path = root / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    in_archive(path, b"\x80\x02}" + text("model") + program + b"s.")
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    return root


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_files_cost_little_time_and_memory(tmp_path):
    files = dict(bombs(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, files.values())], capture_output=True, text=True, timeout=120
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [path for path, *_ in told] == [str(path) for path in files.values()], done.stderr[-2000:]
    for (name, _), (path, said, seconds, kilobytes) in zip(files.items(), told, strict=True):
        assert said and said.startswith(path) and len(said) < 700 and "\n" not in said, (name, said)
        assert seconds < 20 and kilobytes < 500_000, (name, seconds, kilobytes)


def test_what_a_message_shows_of_a_value_is_short():
    from dtgpt.util.errors import shown, shown_name

    doubled = []
    for _ in range(60):
        doubled = [doubled, doubled]
    looped = {}
    looped["self"] = looped
    began = time.process_time()
    for value in (
        doubled, looped, 10**100_000, "x" * 10**7, b"x" * 10**7, Namespace(a=doubled), [10**5000] * 9, {1: doubled},
        torch.zeros(3), StandIn("y" * 10**6), {"k" * 10**6: 1}, (doubled,) * 10**5, float("nan"),
    ):  # fmt: skip
        assert 0 < len(shown(value)) <= 120 and "\n" not in shown(value)
    assert time.process_time() - began < 10  # 0.1; what is shown whole takes for ever
    assert [shown(v) for v in ("a", 1, 2.5, None, True, [1, 2], (3,))] == [
        "'a'",
        "1",
        "2.5",
        "None",
        "True",
        "[1, 2]",
        "(3,)",
    ]
    assert (
        shown_name("h.0.ln_1") == "h.0.ln_1" and shown_name("a\nb") == "'a\\nb'" and len(shown_name("x" * 999)) <= 120
    )
