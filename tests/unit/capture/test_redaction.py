import pytest

from tracekit.capture.manifest import redact
from tracekit.conventions.redaction import REDACTED

GITHUB = "ghp_" + "a1B2" * 9
HUGGING_FACE = "hf_" + "aB3" * 12
AWS = "AKIA" + "ABCDEFGH12345678"
WEB_TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("words", "clean"),
    [
        (["--api-key=abc", "x"], [f"--api-key={REDACTED}", "x"]),
        (["--api-key", "abc", "x"], ["--api-key", REDACTED, "x"]),
        (["--hf_token", "-abc"], ["--hf_token", REDACTED]),
        (["-password", "abc"], ["-password", REDACTED]),
        (["--use-auth-token", "--epochs", "3"], ["--use-auth-token", "--epochs", "3"]),
        (["WANDB_API_KEY=abc", "python"], [f"WANDB_API_KEY={REDACTED}", "python"]),
        (["trainer.wandb.apiKey=abc"], [f"trainer.wandb.apiKey={REDACTED}"]),
        (["-H", "Authorization: Bearer abc.def"], ["-H", f"Authorization: {REDACTED}"]),
        (["--run", GITHUB], ["--run", REDACTED]),
        (["--run", f"name-{HUGGING_FACE}"], ["--run", f"name-{REDACTED}"]),
        ([AWS, WEB_TOKEN], [REDACTED, REDACTED]),
        (["--data", "s3://me:hunter2@host/x"], ["--data", f"s3://{REDACTED}@host/x"]),
        (["https://h:8080/x?token=abc&step=1"], [f"https://h:8080/x?token={REDACTED}&step=1"]),
        (["https://h/x?a=1&X-Amz-Signature=12ab"], [f"https://h/x?a=1&X-Amz-Signature={REDACTED}"]),
        (['{"password": "two words", "lr": 1}'], [f'{{"password": "{REDACTED}", "lr": 1}}']),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_secrets_are_removed_from_a_command_line(words: list[str], clean: list[str]) -> None:
    assert redact(words) == clean


@pytest.mark.parametrize(
    "word",
    [
        "--max-tokens=12",
        "tokens_per_second=3",
        "--tokenizer=llama",
        "key_value_heads: 8",
        "monkey=1",
        "/data/0123456789abcdef0123456789abcdef01/part-0.bin",
        "fsdp2-2026-01-02-a-long-name-with-numbers-in-it-42",
        "https://host:8080/path?step=3",
        "torch==2.13.0+cpu",
    ],
)
def test_values_that_only_resemble_secrets_stay(word: str) -> None:
    assert redact([word]) == [word]


def test_values_under_secret_names_are_redacted_at_any_depth() -> None:
    given = {"optimizer": {"lr": 0.1}, "logger": [{"api_key": ["abc"]}, {"secrets": {"a": 1}}], "db_password": 1234}
    assert redact(given) == {
        "optimizer": {"lr": 0.1},
        "logger": [{"api_key": [REDACTED]}, {"secrets": {"a": REDACTED}}],
        "db_password": REDACTED,
    }


def test_a_flag_without_a_value_and_an_empty_value_stay_readable() -> None:
    assert redact({"use_auth": True, "token": None}) == {"use_auth": True, "token": None}
