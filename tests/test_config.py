"""Recipes, `extends`, overrides, and what a user is told about a mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from experiential.bank.options import ManagerOptions
from experiential.cli.main import configuration_page
from experiential.cli.preflight import check_experiment
from experiential.config import BankSettings, EnvSettings, Experiment, RunSettings
from experiential.errors import ConfigError
from experiential.recipe import (
    RECIPES,
    describe_recipe,
    dump_experiment,
    load_experiment,
    misplaced_numbers,
    recipe_names,
    settings_reference,
)

KEYS = [setting.key for setting in settings_reference()]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_recipes_of_the_paper_are_there() -> None:
    baselines = {
        "grpo",
        "dr-grpo",
        "rloo",
        "reinforce-baseline",
        "offline",
        "static-online",
        "exp-only",
        "history",
        "template",
    }
    ablations = {
        f"complementary-{name}"
        for name in ("all-guided", "pooled", "critic", "self-distill", "perplexity")
    }
    others = {"complementary", "evolver", "erl", "erl-no-memory", "erl-no-reflection"}
    assert baselines | ablations | others <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_loads_is_short_and_says_what_it_does(name: str) -> None:
    assert load_experiment(name).recipe == name
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) < 40
    assert describe_recipe(name).endswith(".")


def test_recipes_differ_in_who_learns_and_who_sees_the_bank() -> None:
    kinds = {}
    for name in ("complementary", "exp-only", "grpo", "static-online"):
        experiment = load_experiment(name)
        kinds[name] = (
            experiment.actor.train,
            experiment.actor.guided,
            experiment.extractor.enabled,
            experiment.extractor.train,
        )
    assert kinds["complementary"] == (True, "half", True, True)
    assert kinds["static-online"][2:] == (True, False)
    assert kinds["grpo"][1:] == ("none", False, False)
    assert kinds["exp-only"][0] is False and kinds["exp-only"][3] is True


def test_overrides_apply_from_left_to_right_over_the_recipe() -> None:
    experiment = load_experiment(
        "complementary", ["run.steps=5", "run.steps=7", "model.name=smollm2", "actor.optim.lr=1e-4"]
    )
    assert (experiment.run.steps, experiment.model.name, experiment.actor.optim.lr) == (
        7,
        "smollm2",
        1e-4,
    )


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("env.kwargs={size: 4}", lambda e: e.env.kwargs == {"size": 4}),
        ("env.kwargs.size=4", lambda e: e.env.kwargs["size"] == 4),
        ("env.kwargs.rate=1e-3", lambda e: e.env.kwargs["rate"] == 0.001),
        ("model.lora={}", lambda e: e.model.lora is not None and e.model.lora.rank == 8),
        ("model.lora.rank=4", lambda e: e.model.lora is not None and e.model.lora.rank == 4),
        ("run.minutes=null", lambda e: e.run.minutes is None),
        ("actor.train=false", lambda e: e.actor.train is False),
        ("env.changes=[{step: 3, worlds: 9}]", lambda e: e.env.changes[0].worlds == 9),
        (
            "extractor_model.name=smollm2",
            lambda e: e.extractor_model is not None and e.extractor_model.name == "smollm2",
        ),
        ("model.name=a=b", lambda e: e.model.name == "a=b"),
    ],
)
def test_override_values_are_yaml(override: str, read: object) -> None:
    assert callable(read) and read(load_experiment("complementary", [override]))


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("actr.train=1", "did you mean actor?"),
        ("run.step=1", "did you mean run.steps?"),
        ("model.lora.rnk=1", "did you mean model.lora.rank?"),
        ("actor.lr=1", "did you mean actor.optim.lr?"),
        ("extractor.lr=1", "did you mean extractor.optim.lr?"),
        ("lr=1", "did you mean actor.optim.lr?"),
        ("extractor.options.max_tokens=4", "did you mean extractor.max_tokens?"),
        ("actor.critic={}", "did you mean methods.critic?"),
        ("bank.trust_after=2", "evidence decides what is shown"),
        ("bank.chroma=x", "it is bank.store now"),
        ("bank.text_limit=9", "it is bank.options.text_limit now"),
        ("bank.retrieval.diversity=0.5", "it is bank.options.retrieval.diversity now"),
        ("cluster.extractor.enforce_eager=true", "it is cluster.extractor.vllm.enforce_eager now"),
        ("model.prefix_cache_tokens=65536", "a tenth of what is free; leave it out"),
        ("reflection.mode=retry", "did you mean methods.reflection?"),
        ("xyzzy=1", "known here: recipe, seed"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment("complementary", [override])
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps=abc", "Expected run.steps to be a valid integer, got 'abc'"),
        ("actor.group_size=-3", "Expected actor.group_size to be greater than 0, got -3"),
        (
            "actor.guided=sometimes",
            "Expected actor.guided to be 'half', 'all', 'none' or 'auto', got 'sometimes'",
        ),
        ("actor.group_size=1", "Expected actor.group_size of at least 2"),
        ("model.lora=16", "Expected model.lora to be a valid mapping"),
        ("seed.x=1", "Expected seed to be a value of type int"),
        ("env.changes=[{step: 3}]", "Expected a value for env.changes.0.worlds"),
        (
            "env.changes=[{step: 3, worlds: 2, erra: 1}]",
            "Expected a known setting, got 'env.changes.0.erra'",
        ),
        ("run.steps", "of the form key=value"),
        ("=3", "of the form key=value"),
        ("run.steps=[1", "Expected a YAML value"),
    ],
)
def test_wrong_value_is_one_clear_line(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment("complementary", [override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_of_the_extractor_are_numbers() -> None:
    with pytest.raises(ConfigError, match="Expected extractor.options.decay to be a valid number"):
        load_experiment("complementary", ["extractor.options.decay=true"])
    options = load_experiment("complementary", ["extractor.options.decay=1"]).extractor.options
    assert options.decay == 1.0


def test_a_method_left_out_by_null_need_not_be_installed() -> None:
    check_experiment(load_experiment("complementary", ["methods={'absent:Method': null}"]))
    with pytest.raises(ConfigError, match="Expected to import 'absent'"):
        check_experiment(load_experiment("complementary", ["methods={'absent:Method': {}}"]))


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'complementary'"):
        load_experiment("complementry")


def test_a_file_extends_a_bundled_recipe_and_its_neighbours(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        f"extends: [grpo, vault]\n{TINY}run: {{steps: 3}}\nactor: {{group_size: 4}}\n",
    )
    mine = write(tmp_path / "mine.yaml", "extends: base.yaml\nactor: {groups: 2}\n")
    experiment = load_experiment(mine)
    assert experiment.recipe == "mine"
    assert (
        experiment.run.steps,
        experiment.actor.group_size,
        experiment.actor.groups,
        experiment.actor.guided,
    ) == (3, 4, 2, "none")


ENV = "env: {id: experiential/Sokoban-v0}\n"
TINY = "model: {name: tiny}\n"
COMPOSED = {"complementary-7b"}  # names its own profiles


@pytest.mark.parametrize("name", sorted(set(recipe_names()) - COMPOSED))
def test_a_method_by_name_is_the_tiny_model_on_vault(tmp_path: Path, name: str) -> None:
    text = f"extends: [environments/vault, {name}, tiny]\nrecipe: {name}\n"
    by_name, composed = load_experiment(name), load_experiment(write(tmp_path / "a.yaml", text))
    assert by_name.model_copy(update={"run": composed.run}) == composed
    assert by_name.model.name == "tiny" and by_name.env.train["worlds"] == 160
    alone = load_experiment(write(tmp_path / "b.yaml", f"extends: {name}\n{ENV}{TINY}")).run
    # The length of the quickstart holds wherever the method says nothing about it.
    assert composed.run == alone and alone.minutes is None
    usual, quick = RunSettings(), RunSettings(steps=80, minutes=4, checkpoint_every=25)
    for key in ("steps", "checkpoint_every"):
        said = getattr(alone, key) != getattr(usual, key)
        assert getattr(by_name.run, key) == getattr(alone if said else quick, key)


def test_a_recipe_that_names_its_profiles_is_completed_by_none(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", "extends: complementary-7b\nrecipe: complementary-7b\n")
    assert load_experiment("complementary-7b") == load_experiment(mine)


def test_a_file_takes_the_method_alone(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", f"extends: complementary\n{ENV}{TINY}")
    experiment = load_experiment(mine)
    assert experiment.actor.guided == "half" and experiment.extractor.train
    method_alone = Experiment(recipe="mine", env=EnvSettings(id="experiential/Sokoban-v0"))
    assert experiment == method_alone, "no number of a profile"


def test_a_method_has_no_model_and_no_environment() -> None:
    for name in set(recipe_names()) - COMPOSED:
        assert not {"env", "model"} & yaml.safe_load((RECIPES / f"{name}.yaml").read_text()).keys()


def test_profiles_are_chosen_by_name() -> None:
    small = load_experiment("complementary+small")
    assert (small.recipe, small.model.name) == ("complementary", "smollm2")
    assert small.env == load_experiment("complementary").env and small.run.minutes is None
    lake = load_experiment("grpo+models/tiny+frozen-lake")
    assert lake.env.id == "experiential/FrozenLake-v0" and lake.bank.retrieval.floor == 0.0
    assert lake.actor.optim.lr == small.actor.optim.lr * 0.3 == pytest.approx(3e-4)


def test_a_method_wins_over_profiles_and_the_last_profile_is_taken_whole(tmp_path: Path) -> None:
    texts = (
        "extends: [frozen, tiny, vault]\n",
        "extends: [vault, models/7b, tiny, frozen]\n",
    )
    first, second = (load_experiment(write(tmp_path / "mine.yaml", text)) for text in texts)
    assert first == second and first.extractor.max_tokens == 512


def test_a_profile_alone_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match=r"Expected a method among .*; join both, as .*\+small"):
        load_experiment("small")


def test_a_file_without_an_environment_is_refused(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.yaml", f"extends: complementary\n{TINY}")
    with pytest.raises(ConfigError, match=r"Expected env.id, got none in .*environments/vault"):
        load_experiment(mine)
    assert load_experiment(mine, ["env.id=mine:Game-v0"]).env.id == "mine:Game-v0"


@pytest.mark.parametrize("model", ["", "model: {lora: {}}\n", "model: null\n"])
def test_a_file_without_a_model_is_refused_and_not_trained_with_the_toy(
    tmp_path: Path, model: str
) -> None:
    mine = write(tmp_path / "mine.yaml", f"extends: complementary\n{ENV}{model}")
    with pytest.raises(ConfigError, match=r"Expected model.name, got none in .*models/tiny"):
        load_experiment(mine)
    assert load_experiment(mine, ["model.name=smollm2"]).model.name == "smollm2"


@pytest.mark.parametrize("nothing", ["null", "{}"])
def test_null_and_an_empty_mapping_replace_what_is_inherited(tmp_path: Path, nothing: str) -> None:
    text = f"extends: [complementary, vault, tiny]\nenv: {{train: {nothing}}}\nactor: {nothing}\n"
    experiment = load_experiment(write(tmp_path / "mine.yaml", text))
    assert experiment.env.train == {} and experiment.env.eval == {"split": "eval", "worlds": 40}
    assert experiment.actor == Experiment().actor, "a whole section is back at its defaults"


def test_an_empty_mapping_turns_an_inherited_part_back_to_its_defaults(tmp_path: Path) -> None:
    lora = load_experiment(
        write(tmp_path / "mine.yaml", f"extends: [grpo, small]\n{ENV}model: {{lora: {{}}}}\n")
    ).model.lora
    assert lora is not None and lora.rank == 8
    off = load_experiment(
        write(tmp_path / "mine.yaml", f"extends: [grpo, small]\n{ENV}model: {{lora: null}}\n")
    )
    assert off.model.lora is None and off.model.name == "smollm2"


def test_numbers_of_another_model_or_environment_are_named(tmp_path: Path) -> None:
    assert list(misplaced_numbers("complementary", ["run.steps=5"])) == []
    (text,) = misplaced_numbers("complementary", ["model.name=smollm2", "actor.epochs=2"])
    assert "model.name is 'smollm2'" in text and "profile models/tiny" in text
    assert "run.minutes=4" in text and "extractor.max_tokens=48" in text
    assert "actor.epochs" not in text and "floor" not in text, "only what was inherited"
    (text,) = misplaced_numbers("complementary+small", ["env.id=mine:Game-v0"])
    assert "env.id is 'mine:Game-v0'" in text and "bank.retrieval.floor=0.89" in text
    (text,) = misplaced_numbers("frozen", ["model.name=smollm2"])
    assert "optim" not in text and "epochs" not in text, "nothing learns"
    mine = write(tmp_path / "mine.yaml", f"extends: complementary\n{ENV}model: {{name: smollm2}}\n")
    assert list(misplaced_numbers(mine)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: [", "Expected readable YAML"),
        ("- 1\n", "Expected a mapping of settings"),
        ("run: {steps: 1, stps: 2}", "did you mean run.steps"),
        ("seed: 1\nseed: 2\n", "got 'seed' twice"),
        ("extends: nowhere\n", "Expected a recipe"),
        ("extends: self.yaml\n", "got a circle through self.yaml"),
        ("extends: 3\n", "Expected `extends` to be a name or a list of names"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "self.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loading_twice_gives_equal_experiments_and_leaves_the_preset_alone() -> None:
    load_experiment("grpo", ["env.kwargs.x=1"])
    assert load_experiment("grpo").env.kwargs == load_experiment("grpo").env.kwargs
    assert "x" not in load_experiment("grpo").env.kwargs


PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)


@given(steps=st.integers(0, 10**6), lr=st.floats(1e-9, 1.0), name=PRINTABLE)
@example(steps=0, lr=1.0, name="0E0")
@example(steps=0, lr=1.0, name="1e-4")
def test_dump_reads_back_to_an_equal_experiment(
    tmp_path_factory: pytest.TempPathFactory, steps: int, lr: float, name: str
) -> None:
    experiment = load_experiment("complementary", [f"run.steps={steps}", f"actor.optim.lr={lr!r}"])
    experiment = experiment.model_copy(
        update={"model": experiment.model.model_copy(update={"name": name})}
    )
    path = write(tmp_path_factory.mktemp("dump") / "config.yaml", dump_experiment(experiment))
    assert load_experiment(path) == experiment


@given(st.sampled_from(KEYS), st.text(max_size=12))
def test_no_override_escapes_as_another_error(key: str, value: str) -> None:
    """Whatever a user types, the outcome is an experiment or a ConfigError of one line."""
    try:
        assert isinstance(load_experiment("complementary", [f"{key}={value}"]), Experiment)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_the_configuration_page_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), "run: make docs"


def test_the_configuration_page_lists_the_options_of_the_manager_in_whole_rows() -> None:
    rows = [line for line in configuration_page().splitlines() if line.startswith("| `")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}  # four cells
    listed = {row.split("`")[1].removeprefix("bank.options.") for row in rows}
    own = ManagerOptions.model_fields.keys() - BankSettings.model_fields.keys()
    assert {*own, "retrieval.hybrid"} <= listed


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_vllm_in_process_refuses_to_sample_a_part_of_what_is_trained(role: str) -> None:
    settings = {"model": {"generator": "vllm"}, role: {"options": {"top_p": 0.9}}}
    with pytest.raises(ValueError, match=rf"{role}\.options\.top_p to be 1 .* got 0\.9"):
        Experiment.model_validate(settings)
    settings[role]["train"] = False
    Experiment.model_validate(settings)


@pytest.mark.parametrize("kind", ["full_reverse_kl", "full_forward_kl"])
def test_divergences_over_the_vocabulary_are_refused_on_a_cluster(kind: str) -> None:
    assert load_experiment("erl", [f"methods.reflection.internalise={kind}"]).runtime == "local"
    with pytest.raises(
        ConfigError, match=f"whose learners hold no second distribution, got '{kind}'"
    ):
        load_experiment("erl", ["runtime=openrlhf", f"methods.reflection.internalise={kind}"])


def test_rollouts_ahead_are_refused_in_a_repeatable_run() -> None:
    with pytest.raises(ConfigError, match=r"Expected run.ahead=0 with run.drain.*, got 2"):
        load_experiment("grpo", ["run.drain=true", "run.ahead=2"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["runtime=openrlhf", "actor.ratio=sequence"], "token or sequence_mean"),
        (["model.generator=vllm", "actor.ratio=sequence"], "token or sequence_mean"),
        (["actor.correction=token", "actor.ratio=sequence_mean"], "none or sequence"),
        (["actor.correction=token", "actor.ratio=sequence"], "none or sequence"),
    ],
)
def test_a_product_of_ratios_against_an_engine_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_experiment("complementary", overrides)
    for ratio, correction in (("token", "token"), ("sequence_mean", "sequence")):
        fine = ["runtime=openrlhf", f"actor.ratio={ratio}", f"actor.correction={correction}"]
        load_experiment("complementary", fine)
    load_experiment("complementary", ["actor.ratio=sequence"])
