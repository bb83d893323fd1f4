# The chapters of one run as a graph of work. `draftlayers run` and `make book` call it; to use
# a cluster, call it yourself with one of Snakemake's executors:
#
#     snakemake --directory runs/<model>/<profile> --config spec=runs/<model>/<profile>/spec.json
#
# What has to run again is decided by each chapter's stamp (draftlayers.chapters), not by dates.

import json
import sys
from pathlib import Path

from draftlayers.chapters import chapter_stamp
from draftlayers.spec import CHAPTERS, Run, RunSpec

SPEC = Path(config["spec"]).resolve()
RUN = Run(RunSpec.model_validate(json.loads(SPEC.read_text())), root=SPEC.parents[2])


rule all:
    input:
        f"executed/{CHAPTERS[-1]}.stamp",


for number, chapter in enumerate(CHAPTERS):

    rule:
        name:
            chapter.replace("-", "_")
        input:
            [f"executed/{CHAPTERS[number - 1]}.stamp"] if number else [],
        output:
            f"executed/{chapter}.stamp",
        params:
            chapter=chapter,
            stamp=chapter_stamp(RUN, chapter),
        threads: workflow.cores
        shell:
            "{sys.executable} -m draftlayers.chapters {params.chapter} {SPEC}"
