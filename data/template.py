"""A checkpoint's chat template is a program of somebody else's: how it is asked without trust.

`Template` renders a chat with it, as transformers' apply_chat_template does, so that `ChatStyle`
can see what it writes. Two things stand between it and this machine: `check` reads the parsed
template before it is compiled, and refuses all but a few kinds of expressions (no macros, no
imports, no operator or filter that makes much of little); and whatever it does when it runs is paid
from a budget of characters, so it ends, and in little memory.
"""

import json

from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

LONGEST_TEMPLATE = 50_000  # characters; MiniMind-3's has 4,000
LONGEST_TEXT = 10_000  # characters that are made at once; the chats that we ask with have hundreds
ITEM = 50  # what a place in a list costs besides, since a text of one character takes 50 bytes
BUDGET = (
    10_000_000  # characters put together or written, and of the template for each turn of loops
)

ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Assign, nodes.NSRef, nodes.Keyword),
    *(nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.CondExpr),
    *(nodes.Name, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter, nodes.Test),
    *(nodes.Add, nodes.Sub, nodes.Mod, nodes.Neg, nodes.And, nodes.Or, nodes.Not),
    *(nodes.Compare, nodes.Operand),
)
FILTERS = ("tojson", "trim", "length", "count", "first", "last", "lower", "upper", "default")
METHODS = "startswith endswith split strip lstrip rstrip lower upper items keys values get".split()


class Template:
    """A chat template, checked and compiled. Any exception where that, or rendering it, fails."""

    def __init__(self, source: str):
        if len(source) > LONGEST_TEMPLATE:
            raise ValueError(f"it has {len(source):,} characters; {LONGEST_TEMPLATE:,} are read")
        self.sandbox = Sandbox(len(source))
        parsed = self.sandbox.parse(source)
        check(parsed)
        for loop in parsed.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
        self.compiled = self.sandbox.from_string(parsed)

    def render(self, messages: list[dict], add_generation_prompt: bool, bos: str | None) -> str:
        """The chat as text; messages as `Tokenizer.render_chat` takes them."""
        self.sandbox.left = BUDGET
        tools = messages[0].get("tools")
        if tools and messages[0]["content"] is None:
            messages = messages[1:]
        return self.compiled.render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,
            bos_token=bos or "",
        )


def check(parsed: nodes.Template) -> None:
    """SecurityError, naming it, for the first thing in a template that is not ALLOWED."""
    for node in parsed.find_all(nodes.Node):
        kind = type(node).__name__
        if not isinstance(node, ALLOWED) or (isinstance(node, nodes.For) and node.recursive):
            raise SecurityError(f"{kind} in line {node.lineno} is not allowed in a chat template")
        if isinstance(node, nodes.Filter) and node.name not in FILTERS:
            raise SecurityError(f"the filter {node.name!r} is not allowed in a chat template")
        # A list of twice a list of twice a list ... is small, until it is written or compared.
        if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair):
            if not all(map(is_constant, node.iter_child_nodes())):
                raise SecurityError(f"{kind} in line {node.lineno} holds more than constants")


def is_constant(node: nodes.Node) -> bool:
    """Whether it is one, or a place for a value, as the a and b of `set a, b = 1, 2`."""
    is_target = isinstance(node, nodes.Name) and node.ctx == "store"
    return isinstance(node, nodes.Const | nodes.Pair) or is_target


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, with less in it, and with a budget."""

    intercepted_binops = frozenset("+-%")

    def __init__(self, template_length: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=self.written
        )
        self.template_length, self.left = template_length, BUDGET
        self.globals = {"namespace": Namespace, "raise_exception": raise_exception}
        for name in ("trim", "lower", "upper"):
            self.filters[name] = self.text_filter(self.filters[name])
        self.filters |= {"tojson": lambda value: self.made(to_json(value)), "counted": self.counted}

    def pay(self, characters: int) -> None:
        self.left -= characters
        if self.left < 0:
            raise SecurityError("it does more than a chat template has to")

    def made(self, value):
        """What an operator, a filter or a method made: not too long, and paid for."""
        length = size(value)
        if length > LONGEST_TEXT:
            raise SecurityError("it makes a text that is too long")
        self.pay(length)
        return value

    def text_filter(self, make):
        """A filter of Jinja's that makes one text of another."""
        return lambda value, *arguments: self.made(make(self.written(value), *arguments))

    def written(self, value):
        """What stands between {{ and }}, or is made another text."""
        if isinstance(value, list | tuple | dict | Namespace):
            raise SecurityError("it writes a list or an object, not text")
        if isinstance(value, str):
            self.pay(len(value))
        return value

    def counted(self, value) -> list:
        """What a loop goes through. Each turn may run the whole template."""
        items = list(value)
        self.pay(len(items) * self.template_length)
        return items

    def call_binop(self, context, operator, left, right):
        if operator == "%" and not isinstance(left, int):
            raise SecurityError("% would make a text that is too long")
        return self.made(super().call_binop(context, operator, left, right))

    def call(self, context, function, /, *arguments, **named):
        return self.made(super().call(context, function, *arguments, **named))

    def wrap_str_format(self, value) -> None:
        """Jinja lets str.format through, watched for attributes, but not for width."""

    def is_safe_attribute(self, obj, attr, value) -> bool:
        if isinstance(obj, str | list | tuple | dict):
            return attr in METHODS
        return isinstance(obj, LoopContext | Namespace) and not attr.startswith("_")


def size(value) -> int:
    """Characters in a text, or in all that a list or an object holds, and ITEM for each of that."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return sum(ITEM + size(x) for x in value) if isinstance(value, list | tuple) else 0


def raise_exception(message):
    raise ValueError(message if isinstance(message, str) else "it refuses the chat")


def to_json(value) -> str:
    """As transformers writes JSON in templates."""
    return json.dumps(value, ensure_ascii=False)
