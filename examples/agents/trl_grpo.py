"""TRL's GRPO on a text environment whose rollouts fill a bank and are advised from it."""

import gymnasium
from datasets import Dataset
from setting import manager, report
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from experiential.adapters import trl_environment
from experiential.llm.models import resolve_model

weights = str(resolve_model("tiny"))  # or "smollm2", or a folder; tiny takes seconds on a CPU
tokenizer = AutoTokenizer.from_pretrained(weights)
tokenizer.chat_template = qwen3_chat_template  # its own has no tools; both mark turns alike
question = {"role": "user", "content": "Act with the tool.\n"}
# One world, and two rollouts in each of two steps: the second step sees what the first taught.
rows = Dataset.from_list([{"prompt": [question], "seed": 1, "options": {"world": 1}}] * 2)
settings = GRPOConfig(
    output_dir="runs/trl",
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=24,
    max_steps=2,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    report_to=[],
    chat_template_kwargs={"enable_thinking": False},
)


class NextStepIsAdvised(TrainerCallback):
    """Wait for the lessons of a step; a long run does not wait."""

    def on_step_end(self, *_: object, **__: object) -> None:
        """Drain the queue."""
        xp.drain()


with manager() as xp:
    rollouts = trl_environment(  # experiential: 1
        lambda: gymnasium.make("experiential/Vault-v0", disable_env_checker=True),  # 2
        xp,  # 3
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights),
        args=settings,
        processing_class=tokenizer,
        train_dataset=rows,
        environment_factory=rollouts,  # experiential: 4
        callbacks=[NextStepIsAdvised()],
    )
    trainer.train()
    for entry in xp.bank.entries():
        report(f"used {entry.statistics.uses} times", entry.text)
