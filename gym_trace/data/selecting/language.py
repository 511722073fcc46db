"""Parser of conditions: from text to a tree.

    condition   = both {"or" both}
    both        = negation {"and" negation}
    negation    = "not" negation | comparison
    comparison  = sum {("==" | "!=" | "<" | "<=" | ">" | ">=" | "in" | "not in" | "is" | "is not") sum}
    sum         = product {("+" | "-") product}
    product     = factor {("*" | "/" | "%") factor}
    factor      = ("-" | "+") factor | call ["." ("any" | "all")] | list | literal | column
    call        = ["abs" | "isnan" | "isinf"] "(" condition ")"
    list        = "[" [factor {"," factor}] "]" | "(" factor "," [factor {"," factor}] ")"
    literal     = number | "text" | 'text' | True | False | None
    column      = name {"." name | "[" number or "text" "]"}

The grammar is that of Python expressions, except that "return" is a valid name. Python's own parser is not used: it
rejects "return", warns about odd text, and crashes on deeply nested brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gym_trace.errors import InvalidOption

_MOST_CHARACTERS = 100_000
_MOST_NESTED = 50  # brackets and signs
_MOST_DIGITS = 1000
_EXCERPT = 72  # characters of the source in an error message
_COMPARISON_SIGNS = ("==", "!=", "<=", ">=", "<", ">", "in", "is", "not")
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "none": None, "null": None}
_RESERVED = frozenset((*_CONSTANTS, "and", "or", "not", "in", "is"))
_FUNCTIONS = ("abs", "isnan", "isinf")
_SEED = re.compile(r"[0-9]{1,18}")
_HINTS = {
    "=": "write == to compare",
    "!": "write 'not'",
    **dict.fromkeys(("&", "&&"), "write 'and'"),
    **dict.fromkeys(("|", "||"), "write 'or'"),
    **dict.fromkeys(("**", "//"), "use + - * / %"),
}
_TOKEN = re.compile(
    r"""(?P<number>(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>[^\W\d]\w*)
    |(?P<sign>==|!=|<=|>=|&&|\|\||\*\*|//|[-+*/%<>()\[\],.=&|!])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


class Token(NamedTuple):
    """A token of a condition. kind: "number", "text", "name", "sign" or "end"; begin, end: character positions."""

    kind: str
    text: str
    begin: int
    end: int


class Node(NamedTuple):
    """A node of the tree of a condition.

    Attributes:
        kind: "or", "and", "not", "comparison", "sum", "product", "minus", "plus", "list", "literal", "column", or a
            function: "abs", "isnan", "isinf", "any" or "all".
        value: the signs between the parts of a "comparison", "sum" or "product"; the values of a "list"; the value of
            a "literal"; the path of a "column".
    """

    kind: str
    value: Any
    parts: tuple[Node, ...]
    begin: int
    end: int


def columns_in(node: Node) -> Iterator[Node]:
    """Yield the nodes of the columns that an expression names."""
    if node.kind == "column":
        yield node
    for part in node.parts:
        yield from columns_in(part)


def names_column(node: Node, column: str) -> bool:
    return any(named.value[0] == column for named in columns_in(node))


def error_at(source: str, begin: int, end: int, problem: str) -> InvalidOption:
    """Return an error that marks its position in the source."""
    left = max(0, min(begin - _EXCERPT // 2, len(source) - _EXCERPT))
    excerpt = "".join(c if c.isprintable() else " " for c in source[left : left + _EXCERPT])
    width = max(1, min(end, left + len(excerpt)) - begin)
    return InvalidOption(f"{problem}\n  {excerpt}\n  {' ' * (begin - left)}{'^' * width}")


def check_condition(text: str) -> None:
    """Check the syntax of a condition, as Trace.select(where=) takes it. Raises InvalidOption.

    Examples:
        >>> gym_trace.playback.check_condition("return > 100 and outcome == 'terminated'")
        >>> gym_trace.playback.check_condition("return >")
        Traceback (most recent call last):
            ...
        gym_trace.errors.InvalidOption: expected a column, number or text, not 'the end'
          return >
                  ^
    """
    parse_condition(text)


def check_order(text: str) -> None:
    """Check the syntax of an order, as Trace.select(sort=) takes it. Raises InvalidOption.

    Examples:
        >>> gym_trace.playback.check_order("split, -return")
    """
    if random_order(text) is None:
        parse_keys(text)


class RandomOrder(NamedTuple):
    """The order "random" or "random:SEED"."""

    seed: int | None


def random_order(text: str) -> RandomOrder | None:
    """Return the random order that a text names; None if it names columns. Raises InvalidOption for another seed."""
    name, colon, seed = text.partition(":")
    if name.strip() != "random":
        return None
    if colon and not _SEED.fullmatch(seed.strip()):
        raise InvalidOption(f"{text}: the seed is not a whole number from 0 to 10^18 - 1; write random:0")
    return RandomOrder(int(seed) if colon else None)


def parse_condition(source: str) -> Node:
    """Parse a condition. Raises InvalidOption, which marks the position."""
    parser = _Parser(source)
    tree = parser.condition()
    parser.expect_end("'and', 'or' or a comparison")
    return tree


def parse_keys(source: str) -> list[tuple[Node, bool]]:
    """Parse sort keys; return each with True if it is descending. Raises InvalidOption."""
    parser = _Parser(source)
    keys: list[tuple[Node, bool]] = []
    while not keys or parser.takes(","):
        descends = bool(parser.takes("-"))
        keys.append((parser.sum(), descends))
    parser.expect_end("',' and another column")
    return keys


def _tokens(source: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    if len(source) > _MOST_CHARACTERS:
        raise InvalidOption(f"condition of {len(source):,} characters; the limit is {_MOST_CHARACTERS:,}")
    while True:
        while at < len(source) and source[at].isspace():
            at += 1
        if at == len(source):
            return [*found, Token("end", "the end", at, at + 1)]
        match = _TOKEN.match(source, at)
        if match is None:
            problem = "missing closing quote" if source[at] in "\"'" else f"unexpected character {source[at]!r}"
            raise error_at(source, at, at + 1, problem)
        token = Token(str(match.lastgroup), match[0], at, match.end())
        if hint := _HINTS.get(token.text):
            raise error_at(source, at, match.end(), f"{token.text!r} is not an operator; {hint}")
        if token.kind == "number" and source[token.end : token.end + 1].isidentifier():
            raise error_at(source, at, token.end + 1, "number directly followed by a name")
        found.append(token)
        at = match.end()


class _Parser:
    """Recursive-descent parser with one method per rule of the grammar."""

    def __init__(self, source: str):
        self._source, self._tokens, self._at, self._depth = source, _tokens(source), 0, 0

    def _error(self, token: Token, problem: str) -> InvalidOption:
        return error_at(self._source, token.begin, token.end, problem)

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._next
        self._at += token.kind != "end"
        return token

    def takes(self, *texts: str) -> Token | None:
        """Consume and return the next token if it is one of these; otherwise return None."""
        return self._take() if self._next.kind in ("sign", "name") and self._next.text in texts else None

    def _expect(self, text: str, opened: Token) -> Token:
        if (token := self.takes(text)) is None:
            raise self._error(self._next, f"missing {text!r} for {opened.text!r}")
        return token

    def expect_end(self, instead: str) -> None:
        if self._next.kind != "end":
            raise self._error(self._next, f"expected {instead}, not {self._next.text!r}")

    def condition(self) -> Node:
        return self._chain("or", ["or"], lambda: self._chain("and", ["and"], self._negation))

    def _chain(self, kind: str, signs: Sequence[str], part: Callable[[], Node]) -> Node:
        """Parse parts that are separated by any of these signs."""
        parts, separators = [part()], []
        while token := self.takes(*signs):
            separators.append(token.text)
            parts.append(part())
        return _node(kind, separators, parts) if separators else parts[0]

    def _negation(self) -> Node:
        if (word := self.takes("not")) is None:
            return self._comparison()
        negated = self._nested(word, self._negation)
        return Node("not", None, (negated,), word.begin, negated.end)

    def _comparison(self) -> Node:
        parts, signs = [self.sum()], []
        while token := self.takes(*_COMPARISON_SIGNS):
            sign = token.text
            if sign == "not" and not self.takes("in"):
                raise self._error(self._next, "expected 'in' after 'not'")
            if sign == "is":
                sign = "is not" if self.takes("not") else "is"
            signs.append("not in" if sign == "not" else sign)
            parts.append(self.sum())
        return _node("comparison", signs, parts) if signs else parts[0]

    def sum(self) -> Node:
        return self._chain("sum", "+-", lambda: self._chain("product", "*/%", self._factor))

    def _factor(self) -> Node:
        if (sign := self.takes("-", "+")) is not None:
            part = self._nested(sign, self._factor)
            return Node("minus" if sign.text == "-" else "plus", None, (part,), sign.begin, part.end)
        if (opened := self.takes("(")) is not None:
            return self._reduced(self._nested(opened, lambda: self._in_brackets(opened)))
        if (opened := self.takes("[")) is not None:
            return self._nested(opened, lambda: self._list(opened, "]", []))
        token = self._take()
        if token.kind == "number":
            return Node("literal", self._number(token), (), token.begin, token.end)
        if token.kind == "text":
            return Node("literal", _unescaped(token.text), (), token.begin, token.end)
        if token.kind != "name" or (token.text in _RESERVED and token.text not in _CONSTANTS):
            raise self._error(token, f"expected a column, number or text, not {token.text!r}")
        if token.text in _CONSTANTS:
            return Node("literal", _CONSTANTS[token.text], (), token.begin, token.end)
        if (opened := self.takes("(")) is not None:
            if token.text not in _FUNCTIONS:
                raise self._error(token, f"unknown function {token.text!r}; use abs(), isnan() or isinf()")
            part = self._nested(opened, self.condition)
            return self._reduced(Node(token.text, None, (part,), token.begin, self._expect(")", opened).end))
        return self._column(token)

    def _reduced(self, node: Node) -> Node:
        """Parse an optional .any, .any(), .all or .all() after a closing bracket."""
        if node.kind == "list" or self.takes(".") is None:
            return node
        if (word := self.takes("any", "all")) is None:
            raise self._error(self._next, "expected any or all after '.'")
        opened = self.takes("(")
        return Node(word.text, None, (node,), node.begin, self._expect(")", opened).end if opened else word.end)

    def _in_brackets(self, opened: Token) -> Node:
        if self._next.text == ")" and self._next.kind == "sign":
            return self._list(opened, ")", [])
        inner = self.condition()
        if self.takes(","):
            return self._list(opened, ")", [inner])
        self._expect(")", opened)
        return inner

    def _list(self, opened: Token, closing: str, parts: list[Node]) -> Node:
        while (closed := self.takes(closing)) is None:
            parts.append(self._factor())
            if not self.takes(","):
                closed = self._expect(closing, opened)
                break
        values = [self._constant(part) for part in parts]
        return Node("list", values, tuple(parts), opened.begin, closed.end)

    def _constant(self, node: Node) -> Any:
        """Return the value of a literal, which may have signs."""
        if node.kind == "literal":
            return node.value
        if node.kind in ("minus", "plus"):
            value = self._constant(node.parts[0])
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value if node.kind == "minus" else value
        raise error_at(self._source, node.begin, node.end, "not allowed in lists; use numbers, text, True, False, None")

    def _column(self, token: Token) -> Node:
        path: list[Any] = [token.text]
        end = token.end
        while (sign := self.takes(".", "[")) is not None:
            key = self._take()
            if sign.text == ".":
                if key.kind != "name":
                    raise self._error(key, "expected a name after '.'; write other keys as [\"key\"]")
                path.append(key.text)
                end = key.end
                continue
            minus = key.text == "-" and key.kind == "sign"
            key = self._take() if minus else key
            if key.kind not in ("number", "text") or (minus and key.kind == "text"):
                raise self._error(key, "expected a number or text in '[ ]'")
            value = self._number(key) if key.kind == "number" else _unescaped(key.text)
            if isinstance(value, float):
                raise self._error(key, "expected a whole number in '[ ]'")
            path.append(-value if minus and isinstance(value, int) else value)
            end = self._expect("]", sign).end
        return Node("column", tuple(path), (), token.begin, end)

    def _number(self, token: Token) -> int | float:
        plain = token.text.replace("_", "")
        if len(plain) > _MOST_DIGITS:
            raise self._error(token, f"number of more than {_MOST_DIGITS} digits")
        try:
            return int(plain) if plain.isdecimal() else float(plain)
        except ValueError as error:
            raise self._error(token, f"invalid number {token.text!r}") from error

    def _nested(self, token: Token, part: Any) -> Node:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self._error(token, f"more than {_MOST_NESTED} nested brackets or signs")
        node: Node = part()
        self._depth -= 1
        return node


def _node(kind: str, value: Any, parts: list[Node]) -> Node:
    return Node(kind, value, tuple(parts), parts[0].begin, parts[-1].end)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text[1:-1], flags=re.DOTALL)
