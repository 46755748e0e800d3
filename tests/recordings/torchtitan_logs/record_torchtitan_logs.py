"""Record logs of torchtitan's own logger (pip install torchtitan==0.3.0), of a loop with its trainer's spans.

The spans are those of torchtitan/trainer.py; the trainer itself needs GPUs. The data loader takes as long as forward
and backward, and step 12 has an evaluation of 0.4 s. For each rank: python record_torchtitan_logs.py FOLDER RANK
"""

import sys
import time


def main(folder: str, rank: int) -> None:
    """Write the log of a rank: 20 steps of about 70 ms."""
    from torchtitan.observability import structured_logger  # tests import this module without torchtitan

    structured_logger.init_structured_logger(source="training", output_dir=folder, rank=rank)
    structured_logger.log_trace_instant("training_start")
    span = structured_logger.log_trace_span
    with span("checkpoint_load"):
        time.sleep(0.01)
    for step in range(1, 21):
        structured_logger.set_step(step, relative_step=step)
        with span("step"):
            with span("fetching_batch"):
                time.sleep(0.03)
            structured_logger.log_trace_scalar({"local_valid_tokens": 4096})
            with span("fwd_bwd"):
                with span("post_dataloading_process"):
                    time.sleep(0.0005)
                time.sleep(0.03)
            with span("optim"):
                time.sleep(0.006)
            if step % 10 == 0:
                with span("collect_dist_metrics"):
                    structured_logger.log_trace_scalar({"global_valid_tokens": 8192})
            if step == 12:
                structured_logger.add_step_tag("eval")
                with span("eval"):
                    time.sleep(0.4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
