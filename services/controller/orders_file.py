"""The file in which the operator's standing orders outlive the controller."""

from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from common.config.folders import write_private
from services.controller.standing_orders import NO_ORDERS, KeptOrders

ORDERS_NAME = "orders.json"
_ADAPTER = TypeAdapter(KeptOrders)

log = structlog.get_logger()


class OrdersFile:
    """``orders.json`` in the controller's ``run_dir``; there is none while no order stands."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ORDERS_NAME

    def read(self) -> KeptOrders:
        """Return what stands, which is told in the log; a damaged file is told of, too."""
        try:
            kept = _ADAPTER.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return NO_ORDERS
        except (OSError, ValidationError) as error:
            log.error("orders_lost", cause="start", file=str(self._path), reason=str(error))
            return NO_ORDERS
        log.warning(
            "orders_stand",
            cause="start",
            roles_by=kept.control or "setting",
            drained=list(kept.drained),
            roles=dict(kept.roles),
            file=str(self._path),
        )
        return kept

    def write(self, kept: KeptOrders) -> None:
        """Replace what was kept; where that fails, the log says that a restart will forget it."""
        try:
            if kept == NO_ORDERS:
                self._path.unlink(missing_ok=True)
            else:
                write_private(self._path, _ADAPTER.dump_json(kept).decode())
        except OSError as error:
            log.error("orders_not_kept", cause="order", file=str(self._path), reason=str(error))
