# The chapters of one run as a graph of work, called by `draftlayers run` and `make book`.
#
# Snakemake orders the jobs and gives them cores or cluster nodes; it does not decide what has to
# run again. Each job asks that itself (draftlayers.jobs), since only then is it known what the
# jobs before it have changed; a job whose work is current ends at once. The files below .jobs/ only
# say which jobs this command has done. The heads of chapter 06 are jobs of their own, known once
# chapter 05 has chosen the layers.

import os
import sys
from pathlib import Path

from draftlayers.jobs import DRAFT_HEAD, end_with_parent
from draftlayers.runs import Run
from draftlayers.spec import CHAPTERS
from draftlayers.contenders import planned_heads

RUN = Run.stored(Path(os.getcwd()).resolve())
SELECTION = "05-selection"

end_with_parent()


def before(chapter):
    number = CHAPTERS.index(chapter)
    return [f".jobs/{CHAPTERS[number - 1]}"] if number else []


def heads(wildcards):
    checkpoints.selection.get()
    return [f".jobs/heads/{name}" for name in planned_heads(RUN)]


for chapter in CHAPTERS:
    if chapter in (SELECTION, DRAFT_HEAD):
        continue

    rule:
        name:
            f"chapter_{chapter[:2]}"
        input:
            before(chapter),
        output:
            touch(f".jobs/{chapter}"),
        params:
            chapter=chapter,
        threads: workflow.cores
        shell:
            "{sys.executable:q} -m draftlayers.jobs {params.chapter} {RUN.folder:q}"


checkpoint selection:
    input:
        before(SELECTION),
    output:
        touch(f".jobs/{SELECTION}"),
    threads: workflow.cores
    shell:
        "{sys.executable:q} -m draftlayers.jobs {SELECTION} {RUN.folder:q}"


rule head:
    input:
        f".jobs/{SELECTION}",
    output:
        touch(".jobs/heads/{head}"),
    threads: workflow.cores
    shell:
        "{sys.executable:q} -m draftlayers.jobs {wildcards.head} {RUN.folder:q}"


rule draft_head:
    input:
        before(DRAFT_HEAD),
        heads,
    output:
        touch(f".jobs/{DRAFT_HEAD}"),
    threads: workflow.cores
    shell:
        "{sys.executable:q} -m draftlayers.jobs {DRAFT_HEAD} {RUN.folder:q}"
