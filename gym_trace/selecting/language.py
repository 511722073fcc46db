"""The grammar of conditions: from text to a tree, in which there is nothing of Python, only what is below.

    condition   = both {"or" both}
    both        = negation {"and" negation}
    negation    = "not" negation | comparison
    comparison  = sum {("==" | "!=" | "<" | "<=" | ">" | ">=" | "in" | "not in" | "is" | "is not") sum}
    sum         = product {("+" | "-") product}
    product     = factor {("*" | "/" | "%") factor}
    factor      = ("-" | "+") factor | "abs" "(" condition ")" | "(" condition ")" | list | literal | column
    list        = "[" [factor {"," factor}] "]" | "(" factor "," [factor {"," factor}] ")"
    literal     = number | "text" | 'text' | True | False | None
    column      = name {"." name | "[" number or "text" "]"}

It is that of Python's expressions, but for names: "return" is one. Not Python's own parser, for which "return" is none,
which warns of odd text, and which text of many brackets can bring down.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gym_trace.errors import InvalidOption

_MOST_CHARACTERS = 100_000
_MOST_DEEP = 50  # brackets and signs in one another
_MOST_DIGITS = 1000
_SHOWN = 72  # characters of a line in which a place is pointed to
_COMPARING = ("==", "!=", "<=", ">=", "<", ">", "in", "is", "not")
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "none": None, "null": None}
_WORDS = frozenset((*_CONSTANTS, "and", "or", "not", "in", "is"))
_HINTS = {
    "=": "write == to compare",
    "&": "write 'and'",
    "&&": "write 'and'",
    "|": "write 'or'",
    "||": "write 'or'",
    "!": "write 'not'",
    "**": "there are + - * / %",
    "//": "there are + - * / %",
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
    """kind: "number", "text", "name", "sign" or "end"; begin, end: characters."""

    kind: str
    text: str
    begin: int
    end: int


class Node(NamedTuple):
    """A part of a condition.

    kind: "or", "and", "not", "comparison" (value: the signs between parts), "sum", "product" (likewise), "minus",
        "abs", "list", "literal" (value: what it is) or "column" (value: its path).
    """

    kind: str
    value: Any
    parts: tuple[Node, ...]
    begin: int
    end: int


def names(node: Node, column: str) -> bool:
    """Whether it speaks of a column."""
    return (node.kind == "column" and node.value[0] == column) or any(names(part, column) for part in node.parts)


def pointed(source: str, begin: int, end: int, problem: str) -> InvalidOption:
    """An error that shows the place it speaks of."""
    left = max(0, min(begin - _SHOWN // 2, len(source) - _SHOWN))
    shown = "".join(c if c.isprintable() else " " for c in source[left : left + _SHOWN])
    width = max(1, min(end, left + len(shown)) - begin)
    return InvalidOption(f"{problem}\n  {shown}\n  {' ' * (begin - left)}{'^' * width}")


def parse_condition(source: str) -> Node:
    """The tree of a condition. Raises InvalidOption, which shows what is wrong with it."""
    parser = _Parser(source)
    tree = parser.condition()
    parser.expect_end("'and', 'or' or a comparison")
    return tree


def parse_keys(source: str) -> list[tuple[Node, bool]]:
    """What to sort by, one key behind the other, and whether it descends. Raises InvalidOption."""
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
        raise InvalidOption(f"a condition of {len(source):,} characters; the longest has {_MOST_CHARACTERS:,}")
    while True:
        while at < len(source) and source[at].isspace():
            at += 1
        if at == len(source):
            return [*found, Token("end", "the end", at, at + 1)]
        match = _TOKEN.match(source, at)
        if match is None:
            problem = "text without an end" if source[at] in "\"'" else f"{source[at]!r} means nothing here"
            raise pointed(source, at, at + 1, problem)
        token = Token(str(match.lastgroup), match[0], at, match.end())
        if hint := _HINTS.get(token.text):
            raise pointed(source, at, match.end(), f"no {token.text!r} here; {hint}")
        if token.kind == "number" and source[token.end : token.end + 1].isidentifier():
            raise pointed(source, at, token.end + 1, "a number that goes over into a name")
        found.append(token)
        at = match.end()


class _Parser:
    """Goes through the tokens once; a method for each rule of the grammar."""

    def __init__(self, source: str):
        self._source, self._tokens, self._at, self._deep = source, _tokens(source), 0, 0

    def _error(self, token: Token, problem: str) -> InvalidOption:
        return pointed(self._source, token.begin, token.end, problem)

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def takes(self, *texts: str) -> Token | None:
        """The next token if it is one of these signs or words; otherwise it stays."""
        return self._take() if self._next.kind in ("sign", "name") and self._next.text in texts else None

    def _expect(self, text: str, opened: Token) -> Token:
        if (token := self.takes(text)) is None:
            raise self._error(self._next, f"{text!r} is missing here, for the {opened.text!r} before")
        return token

    def expect_end(self, instead: str) -> None:
        if self._next.kind != "end":
            raise self._error(self._next, f"{self._next.text!r} was not expected here, but {instead}")

    def condition(self) -> Node:
        return self._chain("or", lambda: self._chain("and", self._negation))

    def _chain(self, word: str, part: Any) -> Node:
        parts = [part()]
        while self.takes(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else _node(word, None, parts)

    def _negation(self) -> Node:
        if (word := self.takes("not")) is None:
            return self._comparison()
        negated = self._deeper(word, self._negation)
        return Node("not", None, (negated,), word.begin, negated.end)

    def _comparison(self) -> Node:
        parts, signs = [self.sum()], []
        while token := self.takes(*_COMPARING):
            sign = token.text
            if sign == "not" and not self.takes("in"):
                raise self._error(self._next, "'in' was expected after 'not'")
            if sign == "is":
                sign = "is not" if self.takes("not") else "is"
            signs.append("not in" if sign == "not" else sign)
            parts.append(self.sum())
        return _node("comparison", signs, parts) if signs else parts[0]

    def sum(self) -> Node:
        """A sum, or what is in the place of one."""
        return self._calculation("sum", ("+", "-"), lambda: self._calculation("product", ("*", "/", "%"), self._factor))

    def _calculation(self, kind: str, known: Sequence[str], part: Any) -> Node:
        parts, signs = [part()], []
        while token := self.takes(*known):
            signs.append(token.text)
            parts.append(part())
        return _node(kind, signs, parts) if signs else parts[0]

    def _factor(self) -> Node:
        if (sign := self.takes("-", "+")) is not None:
            part = self._deeper(sign, self._factor)
            return Node("minus" if sign.text == "-" else "plus", None, (part,), sign.begin, part.end)
        if (opened := self.takes("(")) is not None:
            return self._deeper(opened, lambda: self._in_brackets(opened))
        if (opened := self.takes("[")) is not None:
            return self._deeper(opened, lambda: self._list(opened, "]", []))
        token = self._take()
        if token.kind == "number":
            return Node("literal", self._number(token), (), token.begin, token.end)
        if token.kind == "text":
            return Node("literal", _unescaped(token.text), (), token.begin, token.end)
        if token.kind != "name" or (token.text in _WORDS and token.text not in _CONSTANTS):
            raise self._error(token, f"a column, number or text was expected here, not {token.text!r}")
        if token.text in _CONSTANTS:
            return Node("literal", _CONSTANTS[token.text], (), token.begin, token.end)
        if (opened := self.takes("(")) is not None:
            if token.text != "abs":
                raise self._error(token, f"no function {token.text!r}; there is abs()")
            part = self._deeper(opened, self.condition)
            return Node("abs", None, (part,), token.begin, self._expect(")", opened).end)
        return self._column(token)

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
        """The value of a literal, with its signs."""
        if node.kind == "literal":
            return node.value
        if node.kind in ("minus", "plus"):
            value = self._constant(node.parts[0])
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value if node.kind == "minus" else value
        raise pointed(self._source, node.begin, node.end, "lists hold numbers, text, True, False and None alone")

    def _column(self, token: Token) -> Node:
        path: list[Any] = [token.text]
        end = token.end
        while (sign := self.takes(".", "[")) is not None:
            key = self._take()
            if sign.text == ".":
                if key.kind != "name":
                    raise self._error(key, "a name was expected after '.'; others are written [\"so\"]")
                path.append(key.text)
                end = key.end
                continue
            minus = key.text == "-" and key.kind == "sign"
            key = self._take() if minus else key
            if key.kind not in ("number", "text") or (minus and key.kind == "text"):
                raise self._error(key, "a number or a text was expected in '[ ]'")
            value = self._number(key) if key.kind == "number" else _unescaped(key.text)
            if isinstance(value, float):
                raise self._error(key, "a whole number was expected in '[ ]'")
            path.append(-value if minus else value)  # type: ignore[operator]
            end = self._expect("]", sign).end
        return Node("column", tuple(path), (), token.begin, end)

    def _number(self, token: Token) -> int | float:
        try:
            plain = token.text.replace("_", "")
            if len(plain) > _MOST_DIGITS:
                raise self._error(token, f"a number of more than {_MOST_DIGITS} digits")
            return int(plain) if plain.isdecimal() else float(plain)
        except ValueError as error:
            if isinstance(error, InvalidOption):
                raise
            raise self._error(token, f"{token.text!r} is no number") from error

    def _deeper(self, token: Token, part: Any) -> Node:
        self._deep += 1
        if self._deep > _MOST_DEEP:
            raise self._error(token, f"more than {_MOST_DEEP} brackets or signs in one another")
        node: Node = part()
        self._deep -= 1
        return node


def _node(kind: str, value: Any, parts: list[Node]) -> Node:
    return Node(kind, value, tuple(parts), parts[0].begin, parts[-1].end)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text[1:-1], flags=re.DOTALL)
