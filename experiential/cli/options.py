"""Define the options that several commands take, and the one way in which they name a model."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from experiential.cli.completion import complete_part, complete_suite
from experiential.cli.errors import show_version
from experiential.config import ModelSettings, ServerSettings
from experiential.errors import ConfigError, first_problem
from experiential.llm.base import IN_PROCESS, read_options

if TYPE_CHECKING:
    from experiential.bank.extractor import Extractor

AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
Version = Annotated[
    bool, Option("--version", callback=show_version, is_eager=True, help="Print the version.")
]
Namespace = Annotated[str, Option(help="Namespace inside the bank.")]
Embedder = Annotated[
    str | None,
    Option(
        help="For a new bank: a sentence-transformers name or folder, hashing, or openai:MODEL@URL"
        " for a server.",
        autocompletion=complete_part("embedders", "hashing"),
    ),
]
Store = Annotated[
    str | None,
    Option(
        help="Index from now on: chroma, address of a Chroma server, faiss, exact, an entry point"
        " or module:attribute. By default it does not change.",
        autocompletion=complete_part("stores", "exact"),
    ),
]
Backend = Annotated[
    str | None,
    Option(
        help="Backend of the model: local (default), openai (default with --base-url), scripted,"
        " an entry point of experiential.llms, or module:attribute.",
        autocompletion=complete_part("llms"),
    ),
]
BaseUrl = Annotated[
    str | None,
    Option(
        metavar="URL",
        help="Address of an OpenAI-compatible server, mostly ending in /v1; else OPENAI_BASE_URL"
        " with --backend openai.",
    ),
]
KeyEnv = Annotated[
    str | None,
    Option(
        "--api-key-env",
        metavar="NAME",
        help="Environment variable with the server's key.  [default: OPENAI_API_KEY]",
    ),
]
Review = Annotated[
    bool,
    Option("--review", help="Show distilled entries only after `experiential bank approve`."),
]
BackendOption = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUE", help="Option of the backend; may be repeated."),
]

# Of a suite and the agent that plays it

SuiteName = Annotated[
    str,
    Option(
        help="A name of `experiential bench suites`, or module:attribute.",
        autocompletion=complete_suite,
    ),
]
TaskNames = Annotated[
    str | None, Option(help="Only these tasks of the suite, separated by commas.")
]
Agent = Annotated[
    str, Option(help="llm, random, oracle, or module:function of observation and info.")
]
Visits = Annotated[int, Option(min=1, help="Episodes in the same world.")]
SplitName = Annotated[str | None, Option(help="Split of all tasks.  [default: each task's own]")]
Made = Annotated[
    bool, Option("--made", help="Play invented worlds in place of a task's real data.")
]
Timeout = Annotated[
    float | None, Option(min=0, help="Seconds for one request to a server.  [default: 60]")
]
Retries = Annotated[int | None, Option(min=0, help="Further attempts of a request.  [default: 2]")]
Concurrency = Annotated[
    int | None, Option(min=1, help="Simultaneous requests to a server.  [default: 64]")
]
Price = Annotated[
    tuple[float, float] | None,
    Option(
        metavar="IN OUT", help="Dollars for a million prompt tokens and a million response tokens."
    ),
]
ExtraBody = Annotated[
    str | None, Option(metavar="JSON", help="JSON merged into every request to a server.")
]
Replies = Annotated[
    Path | None, Option(help="Replies of the scripted backend, one per line, repeated.")
]
Dtype = Annotated[Literal["float32", "bfloat16"], Option(help="Precision of a local model.")]
Device = Annotated[str, Option(help="Device of a local model.")]
Temperature = Annotated[float, Option(min=0, help="Temperature of sampling; 0 is greedy.")]
MaxTokens = Annotated[int, Option(min=1, help="Most tokens of a response.")]
History = Annotated[
    int | None, Option(min=0, help="Past turns shown to the model.  [default: all]")
]
Instruction = Annotated[str, Option(help="Text about the environment for the agent.")]
Constrain = Annotated[
    bool,
    Option("--constrain", help="Choose among the admissible actions; always with the tiny model."),
]


def named_model(
    model: str | None,
    base_url: str | None = None,
    key_env: str | None = None,
    backend: str | None = None,
    backend_option: Sequence[str] | None = None,
    **options: Any,
) -> ModelSettings:
    """Return the settings of the model that a command line names; it need not exist.

    An address or a key means a server. Its only model is taken where none is named.

    Args:
        model: a name for `ModelSettings.name`, or the name at the server.
        base_url: address of an OpenAI-compatible server.
        key_env: the environment variable with its key.
        backend: another backend than these say.
        backend_option: its options, each as ``key=value``.
        options: further options of the backend, which those replace.

    Raises:
        ConfigError: the server does not say which model it serves, or an option holds a key.
    """
    from pydantic import ValidationError

    from experiential.llm.models import served_model

    backend = backend or ("openai" if base_url or key_env else "local")
    options |= read_options(backend_option or ())
    model = options.pop("model", model)
    if backend in IN_PROCESS and (base_url or key_env):
        raise ConfigError(
            f"Expected no --base-url and no --api-key-env with --backend {backend}, got"
            f" {base_url or key_env}; leave out --backend"
        )
    if backend == "local" and not options:
        return ModelSettings(name=model or "tiny")
    try:
        server = ServerSettings(backend=backend, url=base_url, key_env=key_env, options=options)
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error
    settings = ModelSettings(name=model or ("tiny" if backend in IN_PROCESS else ""), server=server)
    if backend == "openai" and not model:
        settings = settings.model_copy(update={"name": served_model(settings)})
    return settings


def model_overrides(section: str, model: ModelSettings) -> list[str]:
    """Return the overrides of a run that put this model into a section, ``model`` say."""
    server = None if model.server is None else model.server.model_dump(exclude_defaults=True)
    return [f"{section}.name={json.dumps(model.name)}", f"{section}.server={json.dumps(server)}"]


@contextmanager
def opened_extractor(settings: ModelSettings, seed: int | None = None) -> Generator[Extractor]:
    """Open the model of these settings as an extractor for a while.

    The extractor that a run has trained is asked as in that run: prompts, sampling, operations.
    """
    from experiential.agents.extractor import ExtractorAgent
    from experiential.llm.models import open_model
    from experiential.training.roles import prompt_set_name, trained_extractor

    with closing(open_model(settings)) as llm:
        trained = trained_extractor(settings, llm)
        if trained is None:
            trained = ExtractorAgent(llm, prompts=prompt_set_name(settings), seed=seed)
        yield trained
