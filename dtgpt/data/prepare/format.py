"""Files of which `dtgpt prepare` makes data, as the core asks for them."""

from pathlib import Path

from dtgpt.config.sections import DataConfig
from dtgpt.data.open import DataFormat


class Tables(DataFormat):
    def check_text(self, data: DataConfig, model: Path | None) -> None:
        """Raise UserError for a table, with the lines that make JSON lines of it."""
        from dtgpt.data.prepare.inputs import check_not_csv

        if data.path is not None:
            check_not_csv(data.path)


TABLES = Tables()
