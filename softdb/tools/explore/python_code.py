"""Write the Python code that gives the same answer as the page."""

from __future__ import annotations

from softdb.database import SoftDB
from softdb.tools.explore.plane import SearchResult
from softdb.tools.explore.questions import Question, Weighing
from softdb.tools.explore.suggestions import known_words


def code(db: SoftDB, encoder: str | None, question: Question, weighing: Weighing, matches: SearchResult) -> str:
    """Return Python code that gives the same answer; `encoder`: the option --encoder."""
    return f"{_opening(db, encoder)}\n{_answering(question, weighing, matches)}"


def _opening(db: SoftDB, given: str | None) -> str:
    """Return Python code that opens the database with its encoder; `given`: the option --encoder."""
    lines, place = ["import softdb", ""], str(db.path)
    option = "" if given is None else f", encoder={given!r}"
    if known_words(db):
        lines.insert(1, "from softdb.data.encoder import demo_encoder")
        option = f", encoder=demo_encoder({place!r})"
    if db.path is None:
        place, option = "softdb-demo", ", encoder=demo_encoder()"
        lines.append("# after the command: softdb demo")
    return "\n".join([*lines, f'db = softdb.open({place!r}, mode="r"{option})'])


def _answering(question: Question, weighing: Weighing, matches: SearchResult) -> str:
    """Return Python code that gives the same answer."""
    where = f", where={question.filter!r}" if question.where else ""
    ranking = "text" if matches.by_words else question.ranking
    words = f"texts={[question.words or question.text]!r}, mode={ranking!r}, "
    lines = []
    if matches.query is not None and (question.trained or question.moves):
        done = f"{question.trained} steps of training, {len(question.moves)} of gradient descent on the query itself"
        lines = [f"# after {done}", f"query = {[[float(f'{number:.7g}') for number in matches.query[0].tolist()]]}"]
    elif matches.query_id is not None:
        lines = [f"query = db.get({[matches.query_id]!r}).keys"]
    elif matches.query is not None and question.text is not None:
        lines = [f"query = {[question.text]!r}"]
    elif question.vector is not None:
        lines = [f"query = [[{', '.join(f'{number:.7g}' for number in question.vector)}]]"]
    first = "" if ranking == "text" else "query, "
    lines.append(f"hits = db.search({first}{words if ranking != 'vector' else ''}k={question.shown}{where})")
    if matches.query is not None:
        more = "".join(f", {name}={value!r}" for name, value in weighing.options.items())
        lines.append(f"answer = db.attend(query, temperature={weighing.temperature:g}{more}{where})")
    return "\n".join(lines)
