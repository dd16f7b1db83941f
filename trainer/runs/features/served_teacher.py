"""Teachers of `train_kd` on servers: --teacher http://HOST:PORT. See `rollout/rewards/teacher_server.py`."""

from trainer.datasets.batches.global_batches import column_of
from trainer.distributed.collectives import rank_0_first
from trainer.model_folders.model_folder import read_config
from trainer.rollout.rewards.remote_rewards import read_key, split_urls
from trainer.rollout.rewards.teacher_server import Asking, TeacherServer, check_lengths
from trainer.runs.feature import Feature


def open_server(run, url: str, number: int) -> TeacherServer:
    """The server at `url`, which is the teacher of this number. Raises UserError for another vocabulary."""
    flags, setup = run.args.teacher, run.setup
    key = read_key("--teacher_api_key", flags.teacher_api_key) if flags.teacher_api_key else None
    asking = Asking(key, flags.teacher_timeout, flags.teacher_retries)
    num_logits = read_config(setup.folder, setup.trust_remote_code).get_text_config().vocab_size

    def opened() -> TeacherServer:
        server = TeacherServer(*split_urls(url, "--teacher"), number, flags.kd_top_k, num_logits, asking)
        server.check_vocabulary(setup.tokenizer)
        return server

    return rank_0_first(opened)


def servers_of(run) -> list[TeacherServer]:
    return [teacher for teacher in run.teachers if isinstance(teacher, TeacherServer)]


def ask_servers(run) -> None:
    """Let each micro-batch have the log-probs of the servers."""
    sets = [samples for samples in (run.samples, run.eval_samples) if samples]
    check_lengths(servers_of(run), max(int(column_of(samples, "num_tokens").max()) for samples in sets))
    for server in servers_of(run):
        run.collate_rows = server.with_top(run.collate_rows)


SERVED_TEACHER = Feature("served teacher", servers_of, with_data=ask_servers)
