"""The command that starts a trainer. Nothing here imports torch before the settings are checked, so that --help and a
mistyped key answer at once."""

import os
import sys
import tempfile
import traceback
from contextlib import closing
from importlib import import_module
from typing import Any

from trainers.batch_plan import launched_ranks
from trainers.config import CONFIGS


def launch(algorithm: str, trainer: str, description: str, argv: list[str] | None = None) -> int:
    """The command line of a trainer: 0 when it trained (or only printed), 2 for what cannot run, 1 for a failed run.

    Under torchrun only the first rank speaks; errors are told by whichever rank has them.
    """
    from trainers.cli import answer, parse

    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    prog = f"python -m trainers.{algorithm}"
    arguments = parse(sys.argv[1:] if argv is None else argv, CONFIGS[algorithm], prog=prog, description=description)
    if answer(arguments, prog=prog):
        return 0
    if arguments.doctor:
        return diagnose(algorithm, trainer, arguments.config, prog)
    print(arguments.plan.describe(), flush=True)

    built = build(algorithm, trainer, arguments.config, prog)
    if built is None:
        return 2
    from trainers import dist
    from trainers.rewards import LateRewardError, RewardError
    from trainers.run import TrainingError

    try:
        built.fit()
    except RewardError as error:
        if error.__cause__ is not None:  # the reward's own traceback is for its author
            traceback.print_exception(error.__cause__)
        saved = f"The rollout is in {built.run.dir / 'failed_rollout.jsonl'}; logger.run_dir={built.run.dir} goes on"
        tell(prog, error, f"\n{saved} after step {built.progress.step}.")
        if isinstance(error, LateRewardError):  # at a normal exit Python waits for threads, and its own may never end
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        return 1
    except (TrainingError, dist.RankLost) as error:
        tell(prog, error)
        return 1
    except Exception as error:
        report(error)
        raise
    finally:
        built.close()
    dist.stop()  # after a failure the other ranks may still wait: torchrun ends them
    return 0


def tell(prog: str, error: BaseException, more: str = "") -> None:
    """An error as one line, with the rank that it comes from; torchrun's summary gets it too."""
    where = f", rank {os.environ['RANK']}" if launched_ranks() > 1 else ""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    print(f"{prog}{where}: error: {error}{notes}{more}", file=sys.stderr, flush=True)
    report(error)


def report(error: BaseException) -> None:
    """For torchrun, which names the rank that failed first, and its reason."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def build(algorithm: str, trainer: str, config: Any, prog: str) -> Any:
    """The trainer, or None after a message that says why it cannot be."""
    # torch's OpenMP threads spin at every barrier; on busy cores that halves the speed, on idle ones little is gained.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:  # only now what takes seconds to import
        module = import_module(f"trainers.{algorithm}")
        from trainers.dist import RankLost
        from trainers.out_of_memory import advice, is_out_of_memory
        from trainers.run import TrainingError

        return getattr(module, trainer)(config)
    except ModuleNotFoundError as error:
        tell(prog, error, '; pip install "fastppo[trainer]" brings what the trainers need')
    except (ValueError, TypeError, OSError, ImportError) as error:
        tell(prog, error)
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, TrainingError | RankLost)
        if not (known or is_out_of_memory(error)):
            report(error)
            raise
        tell(prog, error if known else TrainingError(advice("loading the models", error, config)))
    return None


def diagnose(algorithm: str, trainer: str, config: Any, prog: str) -> int:
    """`--doctor`: 0 if one step has nothing wrong with it, 1 if it has, 2 if it cannot be begun."""
    from trainers.doctor import Finding, examine, temporary

    bad, late = 0, False
    with tempfile.TemporaryDirectory() as folder:
        built = build(algorithm, trainer, temporary(config, f"{folder}/run"), prog)
        if built is None:
            return 2
        from trainers import dist
        from trainers.rewards import LateRewardError, RewardError
        from trainers.run import TrainingError

        try:
            with closing(built):
                for finding in examine(built):
                    print(finding, flush=True)
                    bad += not finding.ok
        except (RewardError, TrainingError) as error:
            if isinstance(error, RewardError) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print(Finding(False, "reward" if isinstance(error, RewardError) else "step", str(error)), flush=True)
            bad, late = bad + 1, isinstance(error, LateRewardError)
    print(f"{bad} of the findings are wrong" if bad else "nothing is wrong with this step", flush=True)
    if late:  # see launch()
        os._exit(1)
    dist.stop()
    return 1 if bad else 0
