"""Settings: every error in its words, files and texts in, YAML out, what a resumed run may change, and the help."""

import re
import resource
import subprocess
import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import pytest

from trainers import cli
from trainers.arithmetic import ConfigError, check
from trainers.cli import compare_for_resume, config_yaml, load_config, parse, save_config
from trainers.config import OptimizerConfig, PPOConfig, PPOTrainerConfig, ReinforceTrainerConfig, block, opt, walk
from trainers.config_help import help_text, markdown
from trainers.config_service import ServeConfig
from trainers.config_types import one_of
from trainers.settings import RECIPES, recipes
from trainers.suggestions import ELSEWHERE, suggest

ROOT = Path(__file__).parents[1]
LEAVES = walk(PPOTrainerConfig())
KEYS = [key for key, _, _ in LEAVES]


def error_of(*arguments: str, source=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, list(arguments))
    return str(caught.value)


def run_cli(*arguments: str, capsys) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the arguments given to the command line; 0 where it went on to train."""
    try:
        cli.answer(parse(arguments, prog="prog", description="About."), prog="prog")
        code = 0
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


class TestValues:
    def test_the_defaults(self):
        assert load_config() == PPOTrainerConfig()

    @pytest.mark.parametrize(
        ("text", "key", "value"),
        [
            ("policy.optimizer.lr=1e-4", "policy.optimizer.lr", 1e-4),
            ("policy.optimizer.lr=0", "policy.optimizer.lr", 0.0),
            ("policy.optimizer.betas=[0.8,0.99]", "policy.optimizer.betas", [0.8, 0.99]),
            ("policy.optimizer.betas=[0, 0.99]", "policy.optimizer.betas", [0.0, 0.99]),
            ("policy.generation.stop_strings=[a, 'b, c']", "policy.generation.stop_strings", ["a", "b, c"]),
            ("policy.generation.stop_token_ids=[]", "policy.generation.stop_token_ids", []),
            ("env.params={min_terms: 2, digits: [1, 2]}", "env.params", {"min_terms": 2, "digits": [1, 2]}),
            ("env.params.min_terms=2", "env.params", {"min_terms": 2}),
            ("data.shuffle=false", "data.shuffle", False),
            ("data.prompts=null", "data.prompts", None),
            ("data.prompts='null'", "data.prompts", "null"),
            ("data.prompts=/a=b,c/1e3", "data.prompts", "/a=b,c/1e3"),
            ("data.system_prompt=Note: be [brief", "data.system_prompt", "Note: be [brief"),
            ('data.system_prompt="a" and "b"', "data.system_prompt", '"a" and "b"'),
            ('data.system_prompt=""', "data.system_prompt", ""),
            ("logger.run_dir=1e3", "logger.run_dir", "1e3"),
            ("loss_fn.ratio_clip_c=3", "loss_fn.ratio_clip_c", 3.0),
            ("value.optimizer.lr=${policy.optimizer.lr}", "value.optimizer.lr", 2e-4),
        ],
    )
    def test_an_override_is_read_as_yaml_and_a_text_as_it_stands(self, text, key, value):
        config = load_config(None, [text])
        got = {k: v for k, _, v in walk(config)}[key]
        assert got == value
        assert type(got) is type(value)

    def test_later_layers_win(self, tmp_path):
        (tmp_path / "a.yaml").write_text("ppo: {seed: 1, ppo_epochs: 2}\npolicy.optimizer.lr: 0.5\n")
        config = load_config(tmp_path / "a.yaml", ["ppo.seed=2", "ppo.seed=3"])
        assert (config.ppo.seed, config.ppo.ppo_epochs, config.policy.optimizer.lr) == (3, 2, 0.5)

    def test_a_mapping_is_replaced_as_a_whole(self):
        config = load_config({"env": {"params": {"a": 1}}}, ["env.params={b: 2}"])
        assert config.env.params == {"b": 2}

    def test_blocks_are_dataclasses_and_defaults_are_not_shared(self):
        first, second = load_config(), load_config()
        assert is_dataclass(first.policy.generation)
        assert type(first.policy.optimizer) is OptimizerConfig
        first.policy.generation.stop_strings.append("x")
        first.env.params["a"] = 1
        assert second == PPOTrainerConfig()

    def test_dicts_paths_and_config_objects_as_source(self, tmp_path):
        nested = load_config({"ppo": {"seed": 7}, "data.prompts": tmp_path, "policy.optimizer.betas": (0.1, 0.2)})
        assert nested.data.prompts == str(tmp_path)
        assert nested.policy.optimizer.betas == [0.1, 0.2]
        again = load_config(nested, ["ppo.seed=8"])
        assert (nested.ppo.seed, again.ppo.seed, again.data.prompts) == (7, 8, str(tmp_path))

    def test_another_config_class(self):
        @dataclass
        class Block:
            steps: int = opt(3, "steps")

        @dataclass
        class Tree:
            inner: Block = block(Block)

        assert load_config(None, ["inner.steps=4"], Tree) == Tree(Block(4))


class TestErrors:
    @pytest.mark.parametrize(
        ("key", "meant"),
        [
            ("policy.generation.temprature", "policy.generation.temperature or policy.generation.val.temperature"),
            ("policy.temperature", "policy.generation.temperature or policy.generation.val.temperature"),
            ("temprature", "policy.generation.temperature or policy.generation.val.temperature"),
            ("rollout.generation.temperature", "policy.generation.temperature or policy.generation.val.temperature"),
            (
                "policy.generation.val.temprature",
                "policy.generation.val.temperature or policy.generation.temperature",
            ),
            ("polcy.optimizer.lr", "policy.optimizer.lr"),
            ("lr", "policy.optimizer.lr or value.optimizer.lr"),
            ("ppo.gae_lamda", "ppo.adv_estimator.gae_lambda"),
            ("ppo.ratio_clip_max", "loss_fn.ratio_clip_max"),
            ("actor.kl_coef", "loss_fn.reference_policy_kl_penalty"),
            ("policy.optimizer.lr.x", "policy.optimizer.lr"),
        ],
    )
    def test_an_unknown_key_names_the_nearest(self, key, meant):
        assert error_of(f"{key}=1") == f"there is no setting {key}; did you mean {meant}?"

    def test_an_unknown_key_that_is_like_nothing(self):
        assert error_of("zzz=1") == "there is no setting zzz; --help lists every key"

    def test_an_unknown_key_in_a_file_names_the_file(self, tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text("policy:\n  generation:\n    temp: 1\n")
        assert error_of(source=path).startswith(f"{path}: there is no setting policy.generation.temp; did you mean")

    def test_a_moved_block_names_the_block(self):
        message = error_of(source={"generation": {"temperature": 1.0}})
        assert message == "there is no setting generation; did you mean policy.generation?"

    def test_a_block_is_not_a_value(self):
        expected = "value is a block of settings: set them one by one, as in value.mode=VALUE"
        assert error_of("value=shared") == expected
        assert error_of(source={"value": "shared"}) == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("ppo.ppo_epochs=two", 'ppo.ppo_epochs: expected an integer, got the text "two"'),
            ("ppo.ppo_epochs=2.0", "ppo.ppo_epochs: expected an integer, got the number 2.0"),
            ("ppo.ppo_epochs=true", "ppo.ppo_epochs: expected an integer, got true"),
            ("ppo.ppo_epochs=null", "ppo.ppo_epochs: expected an integer, got null"),
            ("ppo.max_num_epochs=x", 'ppo.max_num_epochs: expected an integer or null, got the text "x"'),
            ("policy.optimizer.lr=[1]", "policy.optimizer.lr: expected a number, got [1]"),
            ("data.shuffle=2", "data.shuffle: expected true or false, got the number 2"),
            ("logger.run_dir=null", "logger.run_dir: expected a text, got null"),
            (
                "policy.optimizer.betas=0.9,0.99",
                'policy.optimizer.betas: expected a list of numbers, such as [0.9, 0.95], got the text "0.9,0.99"',
            ),
            (
                "policy.generation.stop_strings=[1]",
                'policy.generation.stop_strings: expected a list of texts, such as ["a", "b"], got [1]',
            ),
            ("env.params=[1]", "env.params: expected a mapping, such as {name: 1}, got [1]"),
            ("env.params={a:1}", "env.params={a:1}: YAML wants a space after the colon of a:1"),
            ("ppo.seed=[", "ppo.seed=[ cannot be read: expected an integer"),
            ("ppo.seed=", "ppo.seed= has no value: write ppo.seed=VALUE"),
            (
                "data.prompts=",
                "data.prompts= has no value: write data.prompts=VALUE, data.prompts=null for none or "
                "data.prompts='\"\"' for an empty text",
            ),
            ("policy.dtype=fp32", "policy.dtype=fp32: expected auto, float32 or bfloat16; did you mean float32?"),
            ("value.mode=on", "value.mode=on: expected shared, local or remote"),
            ("value.optimizer.lr=${nowhere}", "value.optimizer.lr: Interpolation key 'nowhere' not found"),
        ],
    )
    def test_a_value_that_does_not_fit(self, text, message):
        assert error_of(text) == message

    def test_a_number_is_not_a_text_in_a_file(self):
        # YAML's 1e3 would arrive as "1000.0".
        assert error_of(source={"logger": {"run_dir": 1e3}}) == "logger.run_dir: expected a text, got the number 1000.0"

    def test_an_object_that_yaml_has_no_word_for(self):
        assert error_of(source={"env": {"params": {"a": object()}}}).startswith("env.params")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("a: [", "cannot be read as YAML"),
            ("ppo: {seed: 1}\nppo: {seed: 2}\n", "cannot be read as YAML: while constructing a mapping"),
            ("- 1\n", "expected a mapping of settings, got a list"),
        ],
    )
    def test_a_file_that_is_not_settings(self, tmp_path, content, message):
        path = tmp_path / "bad.yaml"
        path.write_text(content)
        assert f"config={path}: {message}" in error_of(source=path)

    def test_a_file_that_is_not_there(self, tmp_path):
        path = tmp_path / "none.yaml"
        assert error_of(source=path) == f"config={path}: cannot be read as YAML: No such file or directory"

    def test_an_unknown_recipe(self):
        message = error_of(source="ppo_coppy")
        known = "(" + ", ".join(recipes()[:-1]) + f" or {recipes()[-1]})"
        assert message == f"config=ppo_coppy: expected a YAML file or a recipe {known}; did you mean ppo_copy?"

    def test_a_source_of_another_kind(self):
        assert error_of(source=3) == "config: expected a dict, a recipe's name, a YAML file or None, got int"

    def test_it_is_a_value_error(self):
        with pytest.raises(ValueError, match="there is no setting"):
            load_config({"x": 1})


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--ppo.seed", "3"], "--ppo.seed: settings are written key=value, without dashes: ppo.seed=3"),
            (["--ppo.seed=3"], "--ppo.seed=3: settings are written key=value, without dashes: ppo.seed=3"),
            (
                ["--lr", "3"],
                "--lr: settings are written key=value, without dashes: policy.optimizer.lr=3 or value.optimizer.lr=3",
            ),
            (["--config", "x.yaml"], "--config: settings are written key=value, without dashes: config=x.yaml"),
            (["--dryrun"], "--dryrun: did you mean --dry-run?"),
            (["-x"], "-x: settings are written key=value, without dashes: key=VALUE"),
            (["zzz"], "zzz: expected key=value; --help lists every key"),
            (["ppo.seed"], "ppo.seed: expected key=value, such as ppo.seed=VALUE"),
            (["seeds"], "seeds: expected key=value, such as env.seed=VALUE"),
            (["ppo_copy"], "ppo_copy: expected key=value; write config=ppo_copy"),
            (["my.yaml"], "my.yaml: expected key=value; write config=my.yaml"),
            (["config="], f"config= has no value: write config=FILE.yaml or a recipe ({one_of(recipes())})"),
            (["config=a", "config=b"], "config= is given 2 times: a, b"),
            (["ppo.sed=1"], "there is no setting ppo.sed; did you mean ppo.seed?"),
            (["policy.optimizer.lr=-1"], "policy.optimizer.lr=-1.0: expected a number >= 0"),
        ],
    )
    def test_a_mistake_is_one_line_and_code_2(self, arguments, message, capsys):
        assert run_cli(*arguments, capsys=capsys) == (2, "", f"prog: error: {message}\n")

    def test_no_arguments(self):
        arguments = parse([], prog="prog", description="")
        assert arguments.config == PPOTrainerConfig()
        assert (arguments.print_config, arguments.dry_run, arguments.plan.sequences) == (False, False, 32)

    def test_several_problems_are_listed(self, capsys):
        _, _, err = run_cli("policy.optimizer.lr=-1", "ppo.ppo_epochs=0", capsys=capsys)
        assert err.splitlines() == [
            "prog: error: policy.optimizer.lr=-1.0: expected a number >= 0",
            "  ppo.ppo_epochs=0: expected a number >= 1",
        ]

    def test_printed_config_reproduces_the_run(self, tmp_path, capsys):
        odd = 'data.system_prompt=say ${x}, "1e3": ü\n yes'
        overrides = ["config=ppo_copy", "logger.run_dir=1e3", "policy.optimizer.lr=1e-5", "loss_fn.ratio_clip_max=0.28"]
        code, out, err = run_cli(*overrides, "--print-config", capsys=capsys)
        assert (code, err) == (0, "")
        path = tmp_path / "again.yaml"
        path.write_text(out)
        assert load_config(path) == load_config("ppo_copy", overrides[1:])
        config = load_config("ppo_copy", overrides[1:])
        config.data.system_prompt = odd
        config.env.params = {"text": "${policy}", "list": ["null", "on", 1, None]}
        save_config(config, path)
        assert load_config(path) == config
        assert [p.name for p in tmp_path.iterdir()] == ["again.yaml"]

    def test_a_failed_save_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "config.yaml"
        save_config(PPOTrainerConfig(), path)

        def full(*_):
            raise OSError("disk full")

        monkeypatch.setattr("os.replace", full)
        with pytest.raises(OSError, match="disk full"):
            save_config(PPOTrainerConfig(ppo=PPOConfig(seed=5)), path)
        assert load_config(path) == PPOTrainerConfig()
        assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]

    def test_recipes_load_and_pass_the_arithmetic(self):
        assert {"dapo", "ppo_copy", "ppo_smollm2_sentiment", "vapo"} < set(recipes())
        assert recipes(ReinforceTrainerConfig) == ["reinforce_copy", "reinforce_smollm2_sentiment"]
        assert load_config("ppo_smollm2_sentiment") == PPOTrainerConfig()
        assert load_config("reinforce_smollm2_sentiment", (), ReinforceTrainerConfig) == ReinforceTrainerConfig()
        for config_class in (PPOTrainerConfig, ReinforceTrainerConfig):
            for name in recipes(config_class):
                check(load_config(name, config_class=config_class))
        copied = load_config("ppo_copy")
        assert (copied.env.name, copied.policy.dtype, copied.policy.generation.ignore_eos) == ("copy", "float32", True)
        assert load_config("ppo_qwen3_reasoning_gym").data.chat_template is True
        assert load_config(str(RECIPES / "ppo_copy.yaml")) == copied


class TestResume:
    def test_only_keys_that_are_not_free_are_named(self):
        old = load_config()
        new = load_config(
            None, ["ppo.max_num_steps=5", "logger.report=false", "policy.optimizer.lr=1e-3", "env.params.a=1"]
        )
        assert compare_for_resume(old, new) == ["policy.optimizer.lr", "env.params"]
        assert compare_for_resume(old, load_config()) == []

    def test_what_is_free(self):
        free = [key for key, field, _ in LEAVES if field.metadata["free"]]
        assert {"ppo.max_num_steps", "policy.train_micro_batch_size", "checkpointing.save_period"} <= set(free)
        trained = {"policy.optimizer.lr", "ppo.seed", "policy.train_global_batch_size", "env.name", "policy.dtype"}
        assert not trained & set(free)


class TestHelp:
    def test_every_key_has_a_meaning(self):
        for key, field, _ in LEAVES:
            assert len(field.metadata["help"]) > 5, key

    def test_help_lists_every_key_with_its_default(self):
        text = help_text(PPOTrainerConfig(), prog="prog", description="About.", recipes=["copy"], width=160)
        assert "usage: prog [config=" in text
        for key in KEYS:
            assert f"\n  {key}=" in text
        assert re.search(r"value\.optimizer\.lr=0\.001 +peak learning rate\n", text)
        assert re.search(r"value\.mode=shared +where the critic lives[^=]* \[shared \| local \| remote\]\n", text)

    @pytest.mark.parametrize("width", [60, 100])
    def test_help_is_wrapped(self, width):
        text = help_text(PPOTrainerConfig(), prog="p", description="word " * 50, recipes=["copy"], width=width)
        settings = text.split("\npolicy\n")[1]
        assert max(map(len, settings.splitlines())) <= width

    def test_help_answers_without_torch_in_a_second(self):
        code = (
            "import sys\nfrom trainers.cli import parse\n"
            "try: parse(['--help'], prog='p', description='d')\n"
            "except SystemExit as stop: code = stop.code\n"
            "assert code == 0 and not {'torch', 'transformers'} & set(sys.modules), code"
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run.returncode == 0, run.stderr
        assert "policy.generation.temperature=1.0" in run.stdout
        # CPU time: what else runs on the machine does not count.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0

    @pytest.mark.parametrize(
        ("module", "key"), [("ppo", "policy.generation.temperature=1.0"), ("serve_critic", "limits.max_waiting=256")]
    )
    def test_a_modules_own_help_answers_without_torch(self, module, key):
        code = (
            f"import runpy, sys\nsys.argv = ['{module}', '--help']\n"
            f"try: runpy.run_module('trainers.{module}', run_name='__main__')\n"
            "except SystemExit as stop: code = stop.code\n"
            "assert code == 0 and not {'torch', 'transformers'} & set(sys.modules), code"
        )
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert key in run.stdout

    def test_the_docs_are_up_to_date(self):
        path = ROOT / "docs" / "config.md"
        assert path.read_text() == markdown(PPOTrainerConfig(), ReinforceTrainerConfig(), ServeConfig()), (
            "python -m trainers.cli --markdown > docs/config.md"
        )

    def test_docs_have_a_row_per_key(self):
        text = markdown(PPOTrainerConfig(), ReinforceTrainerConfig(), ServeConfig())
        page, differences, service = re.split("^## python -m .*$", text, flags=re.MULTILINE)
        assert service.count("\n| `") == len({k for k, _, _ in walk(ServeConfig())} - {*KEYS})
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        assert len(rows) == len(KEYS)
        assert "| `reinforce.adv_estimator.name` | `rloo` |" in differences
        assert "| `value.mode` | `shared` |" in "\n".join(rows)
        assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)

    def test_names_of_other_trainers_lead_to_keys_that_exist(self):
        assert set(ELSEWHERE.values()) <= {*KEYS}
        for name, key in ELSEWHERE.items():
            assert suggest(f"elsewhere.{name}", KEYS)[0] == key
        assert suggest("data.max_response_length", KEYS) == [
            "policy.generation.max_new_tokens",
            "ppo.reward_shaping.max_response_length",
        ]


def test_every_setting_is_read():
    """A key that nothing reads would be accepted and ignored."""
    about_settings = {
        "config",
        "config_help",
        "config_types",
        "settings",
        "suggestions",
        "cli",
        "arithmetic",
        "ranges",
        "dry_run",
        "config_checks",
        "config_remote",
        "config_service",
    }
    files = [path for path in (ROOT / "trainers").rglob("*.py") if path.stem not in about_settings]
    text = "\n".join(path.read_text() for path in files)
    unread = [key for key in KEYS if not re.search(rf"\.{key.rsplit('.', 1)[-1]}\b", text)]
    assert unread == []


def test_yaml_holds_every_key():
    lines = [line.strip() for line in config_yaml(PPOTrainerConfig()).splitlines()]
    names = [key.rsplit(".", 1)[-1] for key in KEYS]
    assert [name for name in names if not any(line.startswith(f"{name}:") for line in lines)] == []
