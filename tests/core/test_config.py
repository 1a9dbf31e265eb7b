"""The schema, the order of its layers, and the lines that its errors become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from split_core import resolve
from split_core.config import GROUPS, RunConfig
from split_core.errors import SplitError

BASE: dict[str, Any] = {"task": "cls", "data": "digits", "model": "digits_vit", "policy": "entropy"}


def load(*arguments: str, base: dict[str, Any] | None = None) -> RunConfig:
    return resolve.load(resolve.merge(BASE if base is None else base, resolve.parse_arguments(arguments)))


ERRORS = {
    "adapt.imags=3": "adapt.imags: no such setting. Did you mean adapt.images?",
    "train.backbone_lr_=3": "train.backbone_lr_: no such setting. Did you mean adapt.backbone_lr?",
    "rollouts=3": "rollouts: no such setting. Did you mean estimator.rollouts?",
    "tau=3": "tau: no such setting. Did you mean policy.tau?",
    "policy.tua=3": "policy.tua: no such setting. Did you mean policy.tau?",
    "estimator.dual.lrr=3": "estimator.dual.lrr: no such setting. Did you mean estimator.dual.lr?",
    "qqqqqqq=3": "qqqqqqq: no such setting. --help lists the settings.",
    "policy=entrpy": "policy: no policy is called 'entrpy'. Did you mean entropy?",
    "attention=sdap": "attention: no attention is called 'sdap'. Did you mean sdpa?",
    "attention=null": "attention=None: should be a name, one of",
    "policy=null": "policy=None: should be a name, one of",
    "policy=[1]": "policy: no name is given; write policy=NAME, one of",
    "eval.methods=[dense,entrpy]": "eval.methods: no method is called 'entrpy'. Did you mean entropy?",
    "do=trian": "or 'check'. Did you mean train?",
    "decision=treshold": "Did you mean threshold?",
    "estimator.dual.kind=papr": "estimator.dual.kind=papr: should be 'paper' or 'pi'. Did you mean paper?",
    "budget=abc": "budget=abc: should be a valid number",
    "budget=0": "budget=0: should be greater than 0",
    "budget=1.5": "budget=1.5: should be less than or equal to 1",
    "seed=1.5": "seed=1.5: should be a valid integer",
    "seed.x=3": "seed={'x': 3}: should be a valid integer",
    "bench.batch_sizes=3": "bench.batch_sizes=3: should be a valid tuple",
    "bench.batch_sizes=[1,0]": "bench.batch_sizes.1=0: should be greater than or equal to 1",
    "bench.budgets=[2]": "bench.budgets.0=2: should be less than or equal to 1",
    "adapt=3": "adapt=3: should be a valid dictionary",
    "adapt.budget_range=[0.5,0.2]": "adapt.budget_range=[0.5, 0.2]: should be [low, high]",
    "image=/no/such.png": "draw.image=/no/such.png: should be a picture file, but there is no such file",
    "data=imagefolder": "data.root is needed: write data.root=VALUE",
    "budget": "'budget' is not key=value",
    "--budget=3": "'--budget=3' is not key=value",
    "bench.batch_sizes=[1": "bench.batch_sizes=[1: the value cannot be read",
    "run_dir=${nowhere}": "run_dir=${nowhere}: the value cannot be read",
}


@pytest.mark.parametrize(("argument", "line"), ERRORS.items(), ids=ERRORS)
def test_errors_are_one_line_that_names_key_value_and_what_was_expected(argument: str, line: str) -> None:
    with pytest.raises(SplitError) as caught:
        load(argument)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_the_most_telling_of_several_faults_is_shown_and_the_others_are_counted() -> None:
    with pytest.raises(SplitError, match=r"^modle: no such setting\. Did you mean model\? \(and 2 more\)$"):
        load("modle=timm", base={"task": "cls", "data": "digits"})
    with pytest.raises(SplitError, match=r"model is needed: write model=NAME, one of .*digits_vit"):
        load(base={"task": "cls", "data": "digits", "policy": "dense"})


def test_auto_attention_takes_no_settings() -> None:
    assert load("attention=auto").attention == {"name": "auto"}
    with pytest.raises(SplitError, match="auto takes no settings"):
        load("attention.fast=true")


def test_groups_come_out_complete_with_the_defaults_of_the_chosen_plugin() -> None:
    config = load("policy=entropy", "policy.tau=3", "estimator.lr=0.5")
    assert config.policy == {"name": "entropy", "tau": [3.0]}
    assert config.estimator["name"] == "ppo"
    assert config.estimator["lr"] == 0.5
    assert config.settings("estimator").lr == 0.5  # type: ignore[attr-defined]
    assert config.settings("estimator").dual.kind == "paper"  # type: ignore[attr-defined]


def test_naming_another_plugin_drops_the_settings_of_the_old_one_whatever_the_order() -> None:
    base = BASE | {"policy": {"name": "xattn", "width": 8}}
    for arguments in (["policy=entropy", "policy.tau=3"], ["policy.tau=3", "policy=entropy"]):
        assert load(*arguments, base=base).policy == {"name": "entropy", "tau": [3.0]}
    assert load("policy=entropy", base=base).policy["name"] == "entropy"
    assert load("policy.hidden=4", base=base).policy["width"] == 8
    assert load("policy=xattn", base=base).policy["width"] == 8  # the same name again changes nothing


def test_layers_defaults_recipe_command_line(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nbudget: 0.4\nadapt: {images: 10, batch_size: 2}\npolicy: entropy\n")
    (tmp_path / "top.yaml").write_text("defaults: base\nbudget: 0.5\nadapt: {images: 20}\npolicy: {name: cosine}\n")
    recipe = resolve.read_recipe(resolve.find_recipe("top", tmp_path))
    config = load("adapt.batch_size=4", base={**BASE, **recipe})
    assert (config.seed, config.budget, config.adapt.images, config.adapt.batch_size) == (1, 0.5, 20, 4)
    assert config.policy["name"] == "cosine"
    assert config.adapt.grad_clip == RunConfig.model_fields["adapt"].default.grad_clip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("defaults: a\n", "its defaults lead back to itself"),
        ("seed: [1\n", "cannot be read"),
        ("- 1\n- 2\n", "should hold 'key: value' lines"),
        ("seed: 1\nseed: 2\n", "cannot be read"),
        ("defaults: bb\n", "no recipe is called 'bb'"),
    ],
)
def test_bad_recipes_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SplitError) as caught:
        resolve.read_recipe(resolve.find_recipe("a", tmp_path))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_is_found_by_name_or_path_and_the_nearest_is_named(tmp_path: Path) -> None:
    (tmp_path / "digits_cls.yaml").write_text("seed: 1\n")
    assert resolve.find_recipe("digits_cls", tmp_path) == tmp_path / "digits_cls.yaml"
    assert resolve.find_recipe(str(tmp_path / "digits_cls.yaml"), Path()) == tmp_path / "digits_cls.yaml"
    with pytest.raises(SplitError, match="Did you mean digits_cls"):
        resolve.find_recipe("digit_cls", tmp_path)
    with pytest.raises(SplitError, match=r"recipe=x\.yaml: there is no such file"):
        resolve.find_recipe("x.yaml", tmp_path)


def test_values_are_yaml_and_a_bare_no_is_a_precision() -> None:
    config = load("budget=5e-1", "precision=no", "bench.batch_sizes=[1,8]", "threads=null", "run_dir=a=b")
    assert config.budget == 0.5
    assert (config.precision, config.bench.batch_sizes, config.threads) == ("no", (1, 8), None)
    assert config.run_dir == "a=b"


def test_methods_are_policies_and_the_warm_start_of_the_runs_own() -> None:
    config = load("policy=xattn", "eval.methods=[dense,xattn_warmstart]", "bench.methods=[random]")
    assert config.eval.methods == ("dense", "xattn_warmstart")
    for method in ("entropy_warmstart", "_warmstart"):
        with pytest.raises(SplitError, match=f"^bench.methods: no method is called '{method}'"):
            load("policy=xattn", f"bench.methods=[{method}]")


def test_run_dir_defaults_to_what_tells_runs_apart() -> None:
    assert load("budget=0.5", "seed=3").run_dir == "runs/cls-digits-entropy-0.5-s3"


def test_a_configuration_does_not_change() -> None:
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_every_field_of_the_schema_is_described() -> None:
    def check(schema: Any) -> None:
        for key, field in schema.model_fields.items():
            assert field.description, (schema, key)
            if hasattr(field.annotation, "model_fields"):
                check(field.annotation)

    check(RunConfig)
    assert set(GROUPS) < set(RunConfig.model_fields)


def test_the_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load("policy=xattn", "estimator.lr=1e-5", "adapt.budget_range=[0.3,0.9]", f"run_dir={tmp_path / 'run'}")
    folder = resolve.claim_run_dir(config)
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    assert resolve.load(resolve.read_recipe(folder / "config.yaml")) == config


def test_a_run_dir_holds_one_run(tmp_path: Path) -> None:
    place = f"run_dir={tmp_path / 'run'}"
    resolve.claim_run_dir(load(place))
    written = (tmp_path / "run" / "config.yaml").read_bytes()
    resolve.claim_run_dir(load(place, "workers=2", "device=cpu", "threads=1", "log_every=3"))
    resolve.check_run_dir(load(place, "do=eval", "eval.images=7", "bench.repeats=1"))
    for arguments, key in [(["policy.tau=3"], "policy.tau"), (["seed=2"], "seed"), (["eval.images=7"], "eval.images")]:
        with pytest.raises(SplitError, match=f"holds a run with other settings \\({key}: "):
            resolve.claim_run_dir(load(place, *arguments))
    with pytest.raises(SplitError, match="seed"):
        resolve.check_run_dir(load(place, "do=eval", "seed=2"))
    assert (tmp_path / "run" / "config.yaml").read_bytes() == written
    with pytest.raises(SplitError, match="is not a folder"):
        resolve.check_run_dir(load(f"run_dir={tmp_path / 'run' / 'config.yaml'}"))
