/** The parts of ECharts that the dashboard uses. Loaded on its own, once a page has a chart. */
import { CustomChart, LineChart } from 'echarts/charts'
import { GridComponent } from 'echarts/components'
import { init, use } from 'echarts/core'
import { CanvasRenderer } from 'echarts/renderers'

use([CustomChart, LineChart, GridComponent, CanvasRenderer])

export { init }
export type { EChartsType } from 'echarts/core'
