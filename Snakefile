# The chapters of one run as a graph of work. `draftlayers run` and `make book` call it; to use
# a cluster, call it yourself with one of Snakemake's executors:
#
#     snakemake --directory runs/<model>/<profile> --config spec=runs/<model>/<profile>/spec.json
#
# What has to run again is decided by stamps (draftlayers.chapters), not by dates. The heads of
# chapter 06 are jobs of their own, known once chapter 05 has chosen the layers.

import json
import sys
from pathlib import Path

from draftlayers.chapters import DRAFT_HEAD, chapter_stamp, planned_heads
from draftlayers.spec import CHAPTERS, Run, RunSpec

SPEC = Path(config["spec"]).resolve()
RUN = Run(RunSpec.model_validate(json.loads(SPEC.read_text())), root=SPEC.parents[2])
SELECTION = "05-selection"


def before(chapter):
    number = CHAPTERS.index(chapter)
    return [f"executed/{CHAPTERS[number - 1]}.stamp"] if number else []


def heads(wildcards):
    checkpoints.selection.get()
    return [f"heads/{name}.stamp" for name in planned_heads(RUN)]


rule all:
    input:
        f"executed/{CHAPTERS[-1]}.stamp",


for chapter in CHAPTERS:
    if chapter in (SELECTION, DRAFT_HEAD):
        continue

    rule:
        name:
            f"chapter_{chapter[:2]}"
        input:
            before(chapter),
        output:
            f"executed/{chapter}.stamp",
        params:
            chapter=chapter,
            stamp=chapter_stamp(RUN, chapter),
        threads: workflow.cores
        shell:
            "{sys.executable} -m draftlayers.chapters {params.chapter} {SPEC}"


checkpoint selection:
    input:
        before(SELECTION),
    output:
        f"executed/{SELECTION}.stamp",
    params:
        stamp=chapter_stamp(RUN, SELECTION),
    threads: workflow.cores
    shell:
        f"{sys.executable} -m draftlayers.chapters {SELECTION} {SPEC}"


rule head:
    input:
        f"executed/{SELECTION}.stamp",
    output:
        "heads/{head}.stamp",
    params:
        stamp=chapter_stamp(RUN, DRAFT_HEAD),
    threads: workflow.cores
    shell:
        "{sys.executable} -m draftlayers.chapters {wildcards.head} {SPEC}"


rule draft_head:
    input:
        before(DRAFT_HEAD),
        heads,
    output:
        f"executed/{DRAFT_HEAD}.stamp",
    params:
        stamp=chapter_stamp(RUN, DRAFT_HEAD),
    threads: workflow.cores
    shell:
        f"{sys.executable} -m draftlayers.chapters {DRAFT_HEAD} {SPEC}"
