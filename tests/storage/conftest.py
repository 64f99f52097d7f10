from tests.servers import memcached as memcached
from tests.servers import own_valkey as own_valkey
from tests.servers import valkey as valkey
