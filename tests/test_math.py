"""The math reward: which answer of a response counts, when two are equal, and what a hostile one can do (nothing)."""

import signal
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainers.config import DataConfig, EnvConfig
from trainers.environments import Prompt, Sample, make_environment
from trainers.environments.answers import equal, expression, written
from trainers.environments.guards import TooSlow, time_limit
from trainers.prompts import load_prompts

ENVIRONMENT = make_environment(EnvConfig(name="math"))


def reward(response: str, answer: object) -> float:
    return ENVIRONMENT.score([Sample(Prompt("Q", {"answer": answer}), (0,), (1,), response, "stop")])[0]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{ \frac{1}{2} }. It is 7", r"\frac{1}{2}"),
        (r"\boxed{a \{ b} and \boxed{\sqrt{\frac{x}{2}}} #### 3", r"\sqrt{\frac{x}{2}}"),
        (r"\boxed{1} \boxed{\boxed{2}}", "2"),
        (r"\boxed{4} and \boxed{5", "4"),  # cut before it was closed
        (r"\boxed {6} #### 3 <answer>4</answer>", "6"),
        ("#### 1\nno\n#### 1,234 \nthat is it 5 <answer>4</answer>", "1,234"),
        ("<answer>3</answer> or <answer>\n4 </answer> 9", "4"),
        ("it was 12, not -7.5", "-7.5"),
        ("4 - 3 = 1", "1"),
        ("from 3-5", "5"),
        ("x = 10 and then $1,000.50.", "1,000.50"),
        (r"3 of them, 25\%", r"25\%"),
        (r"about -\frac{1}{2}", r"-\frac{1}{2}"),
        ("3/4 of 8/9", "8/9"),
        ("no idea", None),
        ("<answer>4", "4"),  # never closed: the last number
        ("", None),
    ],
)
def test_the_final_answer(response, answer):
    assert written(response) == answer


EQUAL = [
    ("42", 42), ("42.0", "42"), ("-3", -3), ("+3", "3"), ("1,234,567", "1234567"), (r"1{,}000", "1000"),
    (r"1\,000", 1000), (".5", "0.50"), ("0.5", 0.5), ("1/2", "0.5"), (r"\frac{1}{2}", "2/4"), (r"\dfrac12", "0.5"),
    (r"-\frac{1}{2}", "-1/2"), (r"\frac{-1}{2}", "-.5"), ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"), ("1e3", "1000"),
    ("2.5e-1", "1/4"), ("50%", "50"), (r"50\%", "0.5"), ("50 percent", "50%"), ("1/2", "50%"), ("$5", "5"),
    (r"\$5.00", "5"), ("5 dollars", "$5"), ("12 cm", "12"), (r"12\text{ cm}^2", "12"), ("12cm", "12 cm"),
    (r"90^\circ", "90 degrees"), ("3.", "3"), ("$x = 3$", "3"), (r"\(7\)", "7"), ("60 km/h", "60"),
    ("100000000000000000000001", "100000000000000000000001"), (r"\text{Paris}", "paris"), ("(C)", "c"),
    ("(1,  2)", "(1,2)"), ("2 x", "2x"), (r"\left(1, \frac{1}{2}\right)", r"(1,\frac{1}{2})"),
    ("(x+1)^2", "x^2 + 2x + 1"), (r"\frac{x}{2}", "x/2"), (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{\pi}{4}", "pi/4"),
    (r"x^{10}", "x**10"), (r"2 \cdot 3^{n}", r"2\times 3^n"), ("sin(x)^2 + cos(x)^2", "1"), ("y = 2x", "2x"),
    ("0.5x", r"\frac{x}{2}"),
]  # fmt: skip

DIFFERENT = [
    ("42", 43), ("0.33", "1/3"), ("3.14", r"\pi"), ("1,23", "123"), ("50%", "5000%"), ("50%", "500"), ("-3", "3"),
    ("1/0", "1"), ("3 million", "3"), ("2 pi", "2"), ("3 thirds", "3"), ("5x", "5"), ("5 x", "5"), ("2 or 3", "2"),
    ("2^3", "2"), ("1e99", "1"), ("x+1", "X+1"), ("(1,2)", "(2,1)"), ("[1,2)", "(1,2)"), ("x^2", "x^3"),
    ("sqrt(x^2)", "x"), ("Paris", "London"), ("", "0"), ("100000000000000000000001", "100000000000000000000000"),
    ("0.1000000000000000000001x", "0.1x"), ("３", "3"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal_answers(answer, reference):
    assert reward(rf"so \boxed{{{answer}}}", reference) == 1.0


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_different_answers(answer, reference):
    assert reward(rf"so \boxed{{{answer}}}", reference) == 0.0


def test_a_reference_may_be_a_solution_that_marks_its_answer():
    assert reward("72", "6 * 12 = 72 eggs\n#### 72") == 1.0
    assert reward("12", "6 * 12 = 72 eggs\n#### 72") == 0.0
    assert reward("0.5", r"Hence $\boxed{\frac12}$ for 3 cases") == 1.0


HOSTILE = [
    "9**9**9**9",
    "((((9**20)**20)**20)**20)**20",
    "9" * 5000,
    "1e999999999",
    r"\frac{1}{" + "9" * 250 + "}",
    "(" * 150 + "1" + ")" * 150,
    "(x+y+z+a+b+c)^{100}",
    "exp(exp(exp(exp(99))))",
    "[1][0]",
    "lambda: 1",
    "x.real",
    "(lambda:1)()",
    "exec(1)",
    "Integral(x)",
    "sin(x, evaluate=1)",
    "x" + "'" * 50,
    "1__1",
    "1_0",
    "\ud800",
    "nan",
    "inf",
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_is_only_wrong(answer):
    start = time.process_time()
    assert reward(rf"\boxed{{{answer}}}", "10") == 0.0
    assert reward(answer[-200:], "10") == 0.0
    assert reward(rf"\boxed{{{answer}}}", "x + y") == 0.0
    assert time.process_time() - start < 10


def test_an_interruption_that_is_lost_is_made_again():
    """Raised in a weak reference's callback, an exception is printed and forgotten."""

    class Node:
        pass

    lost = []

    def callback(_):
        lost.append(1)
        while len(lost) == 1:  # until the first interruption
            pass

    handler, start = signal.getsignal(signal.SIGVTALRM), time.process_time()
    with pytest.raises(TooSlow), warnings.catch_warnings(), time_limit(0.1):
        warnings.simplefilter("ignore")  # pytest tells of exceptions that nobody could catch
        node = Node()
        keep = weakref.ref(node, callback)
        del node
        while True:
            pass
    assert lost and keep() is None and 0.25 < time.process_time() - start < 5
    assert signal.getsignal(signal.SIGVTALRM) == handler


@pytest.mark.parametrize("text", [r"\boxed{", "{", "}", "#### ", "<answer>", "</answer>", "1,", "-", "1/", r"\frac{1"])
def test_long_responses_take_linear_time(text):
    start = time.process_time()
    reward(text * (200_000 // len(text)), "10")
    assert time.process_time() - start < 5


def test_no_code_of_an_answer_runs(tmp_path):
    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).write_text('x')"
    for text in (code, f"sqrt({code})", f"f({code})", f"[{code}]", f"1 if {code} else 2"):
        assert reward(rf"\boxed{{{text}}}", "10") == reward(f"<answer>{text}</answer>", "x+1") == 0.0
        with pytest.raises((ValueError, SyntaxError)):
            expression(text)
    assert not canary.exists()


def test_outside_the_main_thread_there_is_no_symbolic_comparison():
    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(equal, answer, "x+1").result() for answer in ("1+x", "x + 1")] == [False, True]
    assert equal("1+x", "x+1")


def test_metrics():
    samples = [
        Sample(Prompt("Q", {"answer": 1}), (0,), (1,), text, "stop") for text in ("1", r"\boxed{1}", "#### 2", "")
    ]
    assert ENVIRONMENT.metrics(samples, [1.0, 1.0, 0.0, 0.0]) == {"env/answer_marked": 0.5}


def test_the_answer_must_be_there(tmp_path):
    def loaded(rows: str, **params):
        (tmp_path / "p.jsonl").write_text(rows)
        return load_prompts(
            DataConfig(prompts=str(tmp_path / "p.jsonl")), make_environment(EnvConfig(name="math", params=params))
        )

    good = '{"prompt": "a", "answer": 0, "solution": "x"}\n'
    assert len(loaded(good)) == len(loaded(good, answer_key="solution")) == 1
    with pytest.raises(
        ValueError, match=r"prompt 1: the math reward needs .* under 'answer' .*; its keys are \['level'\]"
    ):
        loaded(good + '{"prompt": "b", "level": 3}\n')
    for bad in ("null", "true", "[1]", '" "'):
        with pytest.raises(ValueError, match="prompt 0: the math reward needs an answer, a number or a text.*; got"):
            loaded(f'{{"prompt": "b", "answer": {bad}}}\n')
    with pytest.raises(ValueError, match="the environment has no prompts of its own"):
        load_prompts(DataConfig(), ENVIRONMENT)


def test_its_settings():
    with pytest.raises(ValueError, match=r"env.params.answer_kee is not a setting of math; did you mean answer_key\?"):
        make_environment(EnvConfig(name="math", params={"answer_kee": "x"}))
    with pytest.raises(ValueError, match="env.params.answer_key: expected a text, got 3"):
        make_environment(EnvConfig(name="math", params={"answer_key": 3}))
