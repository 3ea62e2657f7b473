"""OUT.run.json: what a run was made of, so that a resumed one continues that run and no other.

`identity` holds what an answer depends on: a run resumes only where all of it is equal. `ended` comes last, when all
ranks have left together: a run that was killed, or that a rank left without a word, has none. The rest is for people.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dist_infer.errors import DistInferError, UsageError
from dist_infer.intake.record_file import write_atomically

SCHEMA = 1

Identity = Mapping[str, str | int | None]

# What a user changes to make a field as it was; {} is the earlier value.
_FIXES: Mapping[str, str] = {
    "input": "give the input of that run",
    "model": "give the model of that run",
    "seed": "leave --seed out, or give --seed {}",
    "shard": "give --shard {}",
    "dtype": "give --dtype {}",
    "quantize": "give --quantize {}",
    "kv_cache_dtype": "give --kv-cache-dtype {}",
    "load_format": "give --load-format {}",
    "max_model_len": "give --max-model-len {}",
}


@dataclass(frozen=True, slots=True)
class RunFile:
    """The run file of an output."""

    path: Path
    identity: Identity
    has_ended: bool = False

    @classmethod
    def path_for(cls, output: Path) -> Path:
        """Beside the output."""
        return output.with_name(output.name + ".run.json")

    @classmethod
    def read(cls, output: Path) -> Self | None:
        """What the last run of this output has written; None where there is no such file.

        Errors: UsageError for a file that isn't one of ours.
        """
        path = cls.path_for(output)
        try:
            fields = json.loads(path.read_bytes())
            schema, identity = fields["schema"], fields["identity"]
            if not isinstance(identity, dict):
                raise TypeError
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} does not describe a run: give another output, or --overwrite") from error
        if schema != SCHEMA:
            raise UsageError(
                f"{path} has schema {schema}, this version reads {SCHEMA}: resume with the version of then"
            )
        return cls(path, identity, has_ended="ended" in fields)

    def check(self, now: Identity) -> None:
        """The fields of `now` are what they were.

        Errors: UsageError naming the first that is not, both values, and the fix.
        """
        for name, value in now.items():
            then = self.identity.get(name)
            if value != then:
                fix = _FIXES.get(name, "make it as it was").format(then)
                raise UsageError(
                    f"can't resume: {name} is {_show(value)}, in {self.path.name} it is {_show(then)}; "
                    f"{fix}, or start anew with --overwrite"
                )


def write_run_file(output: Path, identity: Identity, facts: Mapping[str, object]) -> None:
    """Written atomically, before the first record and at the end.

    Errors: DistInferError.
    """
    path = RunFile.path_for(output)
    text = json.dumps({"schema": SCHEMA, "identity": dict(identity), **facts}, indent=2)
    try:
        write_atomically(path, text.encode() + b"\n")
    except OSError as error:
        raise DistInferError(f"can't write {path}: {error.strerror}") from error


def _show(value: str | int | None) -> str:
    return "none" if value is None else str(value)
