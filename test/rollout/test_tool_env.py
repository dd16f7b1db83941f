"""Python functions as tools: what the model reads of them, how its calls are passed on, and what is refused."""

import contextlib
import subprocess
import sys

import pytest
from conversations import Script, byte_tokenizer, environments, sampling_of

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.tool_formats import tool_calls
from trainer.datasets.conversations.turns import check_call_format
from trainer.errors import UserError
from trainer.rollout import user_code
from trainer.rollout.envs.environments import Response, load_environment
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.tool_env import from_tools, opening_of

CODE = '''
from trainer.rollout.envs.tool_env import from_tools


def add(a: float, b: float = 1) -> dict:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return {"sum": a + b}


async def shout(text: str) -> str:
    """Write a text in capitals.

    Args:
        text: what to shout
    """
    return text.upper()


class Shop:
    """Keeps the books of one episode."""

    def reset(self, task):
        self.left = task["left"]

    def buy(self, number: int) -> int:
        """Buy some.

        Args:
            number: how many
        """
        self.left -= number
        return self.left

    def reward(self, task, answer):
        return float(answer.strip() == str(self.left))

    def _hidden(self):
        pass


make_environment = from_tools([add, shout], lambda task, answer: float(answer == task["label"]))
shop = from_tools(Shop)
'''


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tools.py").write_text(CODE)
    return str(tmp_path / "tools.py")


def turn(*calls: tuple[str, dict], text: str = "") -> Response:
    return Response(text, text, [{"name": name, "arguments": arguments} for name, arguments in calls], True)


def test_functions_are_tools(path):
    env = load_environment(path)()
    assert env.reset({"question": "2 + 3?", "label": "5"}) == [{"role": "user", "content": "2 + 3?"}]
    assert [tool["function"]["name"] for tool in env.tools] == ["add", "shout"]
    function = env.tools[0]["function"]
    assert function["description"] == "Add two numbers." and "return" not in function
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["b"] == {"type": "number", "description": "the second"}
    found = env.step(turn(("add", {"a": 2, "b": 3}), ("shout", {"text": "ok"}), ("add", {"a": 2})))
    assert [message["content"] for message in found] == ['{"sum": 5}', "OK", '{"sum": 3}']
    assert [message["name"] for message in found] == ["add", "shout", "add"]
    found = env.step(turn(("sub", {}), ("add", {"b": 1}), ("add", {"a": "x", "b": 1}), ("add", {"a": 1, "c": 1})))
    assert all(message["content"].startswith("error: ") for message in found)
    assert "there are add, shout" in found[0]["content"] and "'a'" in found[1]["content"]
    assert env.metrics == {"tool_calls": 7, "tool_errors": 4}
    assert env.step(turn(text="5")) == (1.0, True)


def test_methods_of_an_object_of_each_episode_are_tools(path):
    envs = [load_environment(f"{path}:shop")() for _ in range(2)]
    assert [tool["function"]["name"] for tool in envs[0].tools] == ["buy"]
    for env, left in zip(envs, (10, 20)):
        env.reset({"prompt": [{"role": "user", "content": "buy"}], "left": left})
        env.step(turn(("buy", {"number": 3})))
    assert [env.step(turn(text=str(left)))[0] for env, left in zip(envs, (7, 17))] == [1.0, 1.0]


@pytest.mark.parametrize(
    "line, found",
    [
        ("make_environment = from_tools([lambda a: a], print)", "no docstring"),
        (
            "def f(a):\n    'Doc.\\n\\nArgs:\\n    a: it'\nmake_environment = from_tools([f], print)",
            "missing a type hint",
        ),
        ("make_environment = from_tools([], print)", "without a tool"),
        ("make_environment = from_tools([shout])", "without a reward"),
    ],
)
def test_what_is_no_tool_is_refused_in_one_line(tmp_path, line, found):
    (tmp_path / "broken.py").write_text(f"{CODE}\n{line}\n")
    with pytest.raises(UserError) as error:
        load_environment(str(tmp_path / "broken.py"))
    assert str(error.value).startswith("--env: ") and found in str(error.value) and "\n" not in str(error.value)


def test_an_episode_calls_the_function_and_goes_on(path, world):
    tokenizer = byte_tokenizer("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    texts = ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>', "5"]
    script = Script([[*tokenizer.encode(text, add_special_tokens=False), end] for text in texts])
    prompt = {"row": 0, "label": "5", "prompt_ids": [1], "column question": "2 + 3?", "column label": "5"}
    made = environments(load_environment(path), tokenizer)
    [sample] = generate_episodes(made, script, [prompt], 1, sampling_of(tokenizer, "qwen3"), seed=0, rollout=0)
    assert '{"sum": 5}' in tokenizer.decode(sample.response_ids) and sample.score == 1.0 and sample.finished
    assert "Add two numbers." in tokenizer.decode(sample.prompt_ids)


def test_a_malformed_call_is_told_to_the_model_and_is_no_answer(path):
    env = load_environment(path)()
    env.reset({"question": "2 + 3?", "label": '<tool_call>{"name": "add"'})
    [call] = tool_calls('<tool_call>{"name": "add", "arguments": {"a": 2,}}</tool_call>', env.tools)
    [message] = env.step(Response("", "", [call], True))
    assert message["name"] == "add" and message["content"].startswith("error: the call is not valid JSON")
    assert env.metrics == {"tool_calls": 1, "tool_errors": 1}


@pytest.mark.parametrize("name, known", [("qwen3", True), ("llama3_1", True), ("gemma3", False)])
def test_a_template_with_an_unknown_format_of_calls_is_refused(path, name, known):
    tokenizer = byte_tokenizer("qwen3")
    tokenizer.chat_template = training_templates.read(name)
    make = load_environment(path)
    with contextlib.nullcontext() if known else pytest.raises(UserError, match="format that is not known"):
        check_call_format(tokenizer, make.tools)
    check_call_format(tokenizer, None)  # an environment without tools needs none


def test_a_repeatable_tool_whose_connection_fails_is_called_again_and_another_costs_the_sample(monkeypatch):
    monkeypatch.setattr(user_code, "PAUSES", (0.01, 0.02))
    errors = [ConnectionResetError("gone"), TimeoutError("late")]

    def search(query: str) -> str:
        """Search.

        Args:
            query: what for
        """
        if errors:
            raise errors.pop()
        return "found"

    env = from_tools([search], lambda task, answer: 0.0)()
    with pytest.raises(TimeoutError):  # the first call may have had an effect
        env.call("search", {"query": "x"})
    errors.append(TimeoutError("late"))
    search.repeatable = True
    assert env.call("search", {"query": "x"}) == ("found", False)
    errors += [ConnectionResetError("gone")] * 3
    with pytest.raises(ConnectionResetError):
        env.call("search", {"query": "x"})
    assert not errors


class Counter:
    """Tools of each kind of method."""

    @staticmethod
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: one number
            b: another number
        """
        return a + b

    @classmethod
    def name(cls, prefix: str) -> str:
        """The name of this class.

        Args:
            prefix: what comes before it
        """
        return prefix + cls.__name__


def test_static_and_class_methods_are_tools_with_all_their_arguments():
    environment = from_tools(Counter, lambda task, answer: 0.0)()
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in environment.tools}
    assert schemas["add"]["required"] == ["a", "b"] and schemas["name"]["required"] == ["prefix"]
    assert environment.call("add", {"a": 2, "b": 3}) == ("5", False)
    assert environment.call("name", {"prefix": "the "}) == ("the Counter", False)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UserError, match="two tools of one name"):
        from_tools([Counter.add, Counter().add], lambda task, answer: 0.0)


def test_a_column_without_a_value_is_none_of_the_opening():
    assert opening_of({"messages": None, "prompt": "hi"}) == [{"role": "user", "content": "hi"}]


def test_schemas_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; from trainer.rollout.envs.tool_env import from_tools\n"
    code += "def f(a: int) -> int:\n    '''F.\\n\\n    Args:\\n        a: a\\n    '''\n"
    code += "print(from_tools([f], lambda task, answer: 0.0)().tools[0]['function']['name'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "f", found.stderr
